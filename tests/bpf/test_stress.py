"""The writer flat out on one CPU, readers flat out on the others: nobody gets a wrong backend.

The reader is a BPF program that runs the product's own ``choose()`` and judges what it gets by the
addresses (stress_reader.c); half of its time it waits at the two worst moments. What the writer
does meanwhile is what a cluster in a roll-out does: ranges replaced, service ports deleted and made
again, ClusterIPs passed from one Service to another. The tests below the first one break the rules
of writing, one each, and must be caught: a test that cannot fail proves nothing.

EBPFLB_STRESS_S sets the seconds of the first test.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ebpflb.datapath.ebpf import abi, audit, libbpf, loader
from ebpflb.datapath.ebpf.grace import Gate, KernelGate
from ebpflb.datapath.ebpf.maps import Map, PinFolder, sizes
from ebpflb.datapath.ebpf.tables import KernelTables, Tables, read
from ebpflb.datapath.ebpf.writer import Writer
from ebpflb.model import (
    Address,
    Backend,
    Family,
    Frontend,
    FrontendKind,
    Plan,
    PlannedPort,
    Policy,
    Protocol,
    Selection,
    ServicePortName,
    Verdict,
)

HERE = Path(__file__).parent
SECONDS = float(os.environ.get("EBPFLB_STRESS_S", "60"))
CONTROL_S = 20.0
"""How long a broken writer may go on before it must have been caught."""

PER_CLASS = 24
# Classes of frontends; the first three are always there. MOVING ones belong to one of two Services.
STEADY, AFFINITY, EXTERNAL, RECREATED, MOVING, MOVING_TOO = range(6)
CLASSES = 5
PERMANENT_CLASSES = 3
MAX_BACKENDS = 12
VARIANTS = 16
"""Sets of backends of one Service, made beforehand so that the writer is busy with writing."""

SIZES = {
    "frontends": 256,
    "ports": 256,
    "backends": 4096,
    "members": 4096,
    "names": 256,
    "affinity": 256,
    "node_addrs": 16,
}
"""Small, so that what is freed is soon used again."""

SCHED_CLS = 3
FAST_REPEAT = 10_000
STALL_REPEAT = 100

STRESS = {
    name.lower(): int(number)
    for name, number in re.findall(r"STRESS_(\w+) = (\d+)", (HERE / "stress_reader.c").read_text())
}
FAULTS = ("missed", "refused", "foreign", "torn", "id")


# --- the cluster: who a backend belongs to stands in its address -------------------------------


def _v4(a: int, b: int, c: int, d: int) -> Address:
    return Address(bytes(10) + b"\xff\xff" + bytes((a, b, c, d)))


def _backends(rng: random.Random, service: int) -> tuple[Backend, ...]:
    """Some backends of ``service``; port and address go together as stress_reader.c has it."""
    chosen = []
    for last in sorted(rng.sample(range(256), rng.randint(1, MAX_BACKENDS))):
        address = _v4(10, service >> 8, service & 255, last)
        number = int.from_bytes(address[12:])
        port = 1024 + ((number * 2654435761 & 0xFFFFFFFF) >> 17)
        chosen.append(Backend(address, port, local=False, terminating=False))
    return tuple(chosen)


def _name(service: int) -> ServicePortName:
    return ServicePortName("stress", f"s{service}", "", Protocol.TCP, Family.IPV4)


def _forward(backends: tuple[Backend, ...]) -> Selection:
    return Selection(Verdict.FORWARD, backends)


class Cluster:
    """The plan, and how it changes at random."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ports: dict[ServicePortName, PlannedPort] = {}
        self.plan = Plan(self.ports)
        self._variants: dict[ServicePortName, list[PlannedPort]] = {}
        self._moved = [False] * PER_CLASS
        for group in range(CLASSES):
            for number in range(PER_CLASS):
                self._put(group, number)

    def change(self) -> set[ServicePortName]:
        """One change; the names of the service ports that it touched."""
        number = self.rng.randrange(PER_CLASS)
        what = self.rng.random()
        if what < 0.15:
            name = _name(RECREATED * PER_CLASS + number)
            if self.ports.pop(name, None) is None:
                self._put(RECREATED, number)
            return {name}
        if what < 0.3:
            old = MOVING + self._moved[number]
            self._moved[number] = not self._moved[number]
            new = MOVING + self._moved[number]
            del self.ports[_name(old * PER_CLASS + number)]
            self._put(new, number)
            return {_name(one * PER_CLASS + number) for one in (old, new)}
        group = self.rng.randrange(CLASSES)
        if group == MOVING:
            group += self._moved[number]
        name = _name(group * PER_CLASS + number)
        if name in self.ports:
            self._put(group, number)
        return {name}

    def _put(self, group: int, number: int) -> None:
        name = _name(group * PER_CLASS + number)
        variants = self._variants.setdefault(name, [])
        if len(variants) < VARIANTS:
            variants.append(self._variant(group, number))
        self.ports[name] = self.rng.choice(variants)

    def _variant(self, group: int, number: int) -> PlannedPort:
        service = group * PER_CLASS + number
        dialled = min(group, MOVING)
        kind = FrontendKind.EXTERNAL_IP if group == EXTERNAL else FrontendKind.CLUSTER_IP
        frontend = Frontend(_v4(10, 96, dialled, number), 80, Protocol.TCP, kind)
        return PlannedPort(
            name=_name(service),
            frontends=(frontend,),
            cluster=_forward(_backends(self.rng, service)),
            local=_forward(_backends(self.rng, service)),
            draining=_backends(self.rng, service) if self.rng.random() < 0.2 else (),
            affinity_s=60 if group == AFFINITY else 0,
            internal_policy=self.rng.choice([*Policy]),
            external_policy=self.rng.choice([*Policy]),
        )


# --- the readers -------------------------------------------------------------------------------


class _Build(loader.Build):
    """The reader's own source around the product's headers."""

    __slots__ = ()

    def text(self) -> str:
        text = (HERE / self.source).read_text()
        headers = loader.flatten("lookup.h")
        return text.replace('#include "lookup.h"', headers) + abi.static_asserts()


class Stress:
    """Maps in a pin folder of their own, and readers on every CPU but the writer's."""

    def __init__(self, folder: PinFolder, maps: Mapping[str, Map], counts_fd: int) -> None:
        self.folder = folder
        self.maps = maps
        self._counts_fd = counts_fd
        self._readers: list[subprocess.Popen[bytes]] = []

    def start_readers(self, cpus: list[int]) -> None:
        fds = [self._load(stall=stall) for stall in (False, True)]
        programs = [f"{fds[0]}:{FAST_REPEAT}", f"{fds[1]}:{STALL_REPEAT}"]
        for cpu in cpus:
            self._readers.append(
                subprocess.Popen(
                    [sys.executable, "-I", "-S", HERE / "stress_reader.py", str(cpu), *programs],
                    stdin=subprocess.PIPE,
                    pass_fds=fds,
                )
            )
        for fd in fds:
            os.close(fd)

    def stop_readers(self) -> None:
        for reader in self._readers:
            assert reader.stdin is not None
            reader.stdin.close()
        for reader in self._readers:
            assert reader.wait(30) == 0
        self._readers.clear()

    def counts(self) -> dict[str, int]:
        """What the readers have counted so far, all CPUs together."""
        found = {}
        for name, index in STRESS.items():
            key, size = index.to_bytes(4, sys.byteorder), 8 * libbpf.possible_cpus()
            raw = libbpf.lookup(self._counts_fd, "stress", key, size)
            found[name] = sum(memoryview(raw or b"").cast("Q"))
        stats = self.maps["stats"]
        for name in ("reread", "foreign_backend"):
            found[name] = sum(stats.per_cpu(abi.CONSTANTS[f"STAT_{name.upper()}"]))
        return found

    def _load(self, *, stall: bool) -> int:
        pins = {name: str(one.path) for name, one in self.maps.items()}
        build = _Build(
            source="stress_reader.c",
            functions=(loader.Function("read_once", SCHED_CLS, 0),),
            defines={
                "STALL": int(stall),
                "CLASSES": CLASSES,
                "PERMANENT_CLASSES": PERMANENT_CLASSES,
                "CLASS_MOVING": MOVING,
                "PER_CLASS": PER_CLASS,
                "SIZE_stress": STRESS["count"],
                **{f"SIZE_{name}": one.max_entries for name, one in self.maps.items()},
            },
            pins={**pins, "stress": str(self.folder.path / "stress-counts")},
        )
        return loader.load(build)["read_once"]

    def kill_readers(self) -> None:
        for reader in self._readers:
            reader.kill()
            reader.wait()
            if reader.stdin:
                reader.stdin.close()


@pytest.fixture
def cpus() -> Iterator[list[int]]:
    """The writer's CPU first; the writer is on it already."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("kernel lacks a second CPU for the readers")
    os.sched_setaffinity(0, usable[:1])
    yield usable[:4]
    os.sched_setaffinity(0, usable)


def _remove(pins: Path) -> None:
    for pin in pins.iterdir():
        pin.unlink()
    pins.rmdir()


@pytest.fixture
def stress() -> Iterator[Stress]:
    folder = PinFolder(Path(f"/sys/fs/bpf/ebpflb-stress-{os.getpid()}"))
    folder.create()
    with ExitStack() as stack:
        stack.callback(_remove, folder.path)
        maps = folder.open_or_create(sizes(SIZES))
        for one in maps.values():
            stack.callback(one.close)
        counts = libbpf.map_create(
            "percpu_array", "stress", key_size=4, value_size=8, max_entries=STRESS["count"]
        )
        stack.callback(os.close, counts)
        libbpf.obj_pin(counts, str(folder.path / "stress-counts"))
        made = Stress(folder, maps, counts)
        stack.callback(made.kill_readers)
        yield made


# --- the writer --------------------------------------------------------------------------------


class NoGrace:
    """Grants everything at once."""

    def __init__(self) -> None:
        self._drawn = 0

    def ticket(self) -> int:
        self._drawn += 1
        return self._drawn

    def done(self) -> int:
        return self._drawn

    def close(self) -> None:
        """Nothing is held."""


class WordFirst(KernelTables):
    """Publishes a range and then fills it, a moment later."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        super().__init__(maps)
        self._late: list[tuple[int, bytes]] = []

    def write_backends(self, base: int, slots: bytes) -> None:
        self._late.append((base, slots))

    def publish(self, index: int, which: int, word: int) -> None:
        super().publish(index, which, word)
        for base, slots in self._late:
            super().write_backends(base, slots)
        self._late.clear()


@contextmanager
def kernel_gate(woken: threading.Event) -> Iterator[Gate]:
    grace = libbpf.GracePeriod()
    grace.wait()
    gate = KernelGate(grace.wait, woken.set)
    yield gate
    gate.close()
    grace.close()


def write(
    cluster: Cluster, writer: Writer, woken: threading.Event, until: Callable[[], bool]
) -> tuple[int, int]:
    """Change and sync flat out, as the agent would; how many changes and how many map writes."""
    waiting: set[ServicePortName] = set()
    changes = writes = 0
    while not until():
        for _ in range(50):
            changed = cluster.change()
            if woken.is_set():
                woken.clear()
                changed |= waiting
            report = writer.sync(cluster.plan, changed)
            assert not report.failed
            waiting = (waiting - changed) | report.deferred
            changes, writes = changes + 1, writes + report.writes
    return changes, writes


def deadline(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def settle(cluster: Cluster, writer: Writer) -> None:
    """Sync until nothing waits for a grace period any more."""
    late = deadline(10)
    waiting: set[ServicePortName] | None = None
    while waiting is None or waiting or writer._retired:
        report = writer.sync(cluster.plan, waiting)
        assert not report.failed
        assert not late(), f"still waiting: {report.deferred}, {len(writer._retired)} retired"
        waiting = set(report.deferred)
        time.sleep(0.001)


def begin(stress: Stress, tables: Tables, gate: Gate, cpus: list[int]) -> tuple[Cluster, Writer]:
    """Fill the maps, then let the readers loose."""
    cluster = Cluster(seed=random.randrange(1 << 32))
    writer = Writer(tables, gate)
    settle(cluster, writer)
    stress.start_readers(cpus[1:])
    return cluster, writer


def faults(counts: Mapping[str, int]) -> dict[str, int]:
    """What must not happen, as far as it did."""
    return {name: counts[name] for name in (*FAULTS, "foreign_backend") if counts[name]}


def example(counts: Mapping[str, int]) -> str:
    return f"10.96.x.y is {counts['example']:#x}, its backend {counts['example2']:#x}"


@pytest.mark.timeout(SECONDS + 120)
def test_no_reader_gets_a_wrong_backend_while_everything_changes(
    stress: Stress, cpus: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    tables = KernelTables(stress.maps)
    woken = threading.Event()
    with kernel_gate(woken) as gate:
        cluster, writer = begin(stress, tables, gate, cpus)
        changes, writes = write(cluster, writer, woken, deadline(SECONDS))
        stress.stop_readers()
        settle(cluster, writer)
        counts = stress.counts()
        with capsys.disabled():
            sys.stdout.write(
                f"\n{counts['lookups']:,} look-ups ({counts['stalls']:,} waits in them) against "
                f"{changes:,} changes ({writes:,} map writes) in {SECONDS:g} s: "
                f"{faults(counts) or 'no fault'}, {counts['reread']} words read again\n"
            )
        assert not faults(counts), example(counts)
        # The grace period alone is enough: the owner check has never had to help.
        assert counts["reread"] == 0
        assert counts["lookups"] > 10_000 * SECONDS
        assert counts["stalls"] > 10 * SECONDS
        assert counts["found"] > counts["lookups"] * PERMANENT_CLASSES / CLASSES
        assert changes > 10 * SECONDS
        assert writer.matches()
        assert not audit.differences(cluster.plan, read(tables))
    tables.close()


def _caught(stress: Stress) -> Callable[[], bool]:
    """Whether the readers have seen anything; asked between changes."""
    late = deadline(CONTROL_S)

    def seen() -> bool:
        counts = stress.counts()
        return bool(faults(counts) or counts["reread"]) or late()

    return seen


def test_a_writer_without_grace_periods_is_caught(stress: Stress, cpus: list[int]) -> None:
    tables = KernelTables(stress.maps)
    cluster, writer = begin(stress, tables, NoGrace(), cpus)
    write(cluster, writer, threading.Event(), _caught(stress))
    stress.stop_readers()
    tables.close()
    counts = stress.counts()
    assert faults(counts) or counts["reread"], counts


def test_a_word_published_before_its_range_is_caught(stress: Stress, cpus: list[int]) -> None:
    tables = WordFirst(stress.maps)
    woken = threading.Event()
    with kernel_gate(woken) as gate:
        cluster, writer = begin(stress, tables, gate, cpus)
        write(cluster, writer, woken, _caught(stress))
        stress.stop_readers()
    tables.close()
    counts = stress.counts()
    assert faults(counts) or counts["reread"], counts


def test_frontend_values_replaced_in_place_are_caught(stress: Stress, cpus: list[int]) -> None:
    tables = KernelTables(stress.maps)
    with kernel_gate(threading.Event()) as gate:
        _cluster, writer = begin(stress, tables, gate, cpus)
        entries = list(stress.maps["frontends"].items())
        seen = _caught(stress)
        while not seen():
            for _ in range(50):
                stress.maps["frontends"].update(entries)
        stress.stop_readers()
        assert writer.matches()
    tables.close()
    counts = stress.counts()
    assert faults(counts), counts
