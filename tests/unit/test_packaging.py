"""setup.cfg names every package by hand: this says when one is missing."""

from __future__ import annotations

import configparser
import importlib.metadata
import importlib.resources
from pathlib import Path

import ebpflb

ROOT = Path(__file__).parents[2]


def test_setup_cfg_names_every_package_of_the_tree() -> None:
    setup_cfg = configparser.ConfigParser()
    setup_cfg.read(ROOT / "setup.cfg")
    named = set(setup_cfg["options"]["packages"].split())
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "ebpflb").rglob("*.py")}
    assert named == {".".join(folder.parts) for folder in folders} | {"ebpflb.bpf"}


def test_the_c_sources_are_found_as_package_data() -> None:
    sources = importlib.resources.files("ebpflb.bpf")
    for source in (*(ROOT / "bpf").glob("*.[ch]"), *(ROOT / "bpf" / "include").rglob("*.h")):
        name = source.relative_to(ROOT / "bpf")
        assert sources.joinpath(*name.parts).read_text() == source.read_text(), name


def test_the_installed_version_is_the_one_in_the_source() -> None:
    assert importlib.metadata.version("ebpflb") == ebpflb.__version__
