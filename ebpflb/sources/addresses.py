# SPDX-License-Identifier: Apache-2.0
"""Where the API server's own endpoints were seen last, for one that is known by its Service only.

In a pod the API server has the address of the Service default/kubernetes, which this node's own
programs translate: an agent that starts where they do not run yet, or whose backends are all gone,
would never learn better. So the endpoints of that Service are remembered, in memory and in a small
file, and tried in turn when the Service's address cannot be connected to. An empty slice changes
nothing: the last endpoints known to be good are kept. A server that the user named by an address
of its own is never reached in another way. This file must not know how requests are made.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from ebpflb.model import (
    Deleted,
    EndpointSlice,
    EndpointState,
    Event,
    ObjectKey,
    Protocol,
    Service,
    Upserted,
    format_address,
    format_endpoint,
)

SERVICE: Final = ObjectKey("Service", "default", "kubernetes")
_NAMES: Final = ("kubernetes", "kubernetes.default", "kubernetes.default.svc")
_PORT_NAME: Final = "https"


class _Saved(msgspec.Struct, frozen=True):
    """The file: the URL that was configured, and those that stand in for it."""

    server: str
    others: tuple[str, ...]


class Addresses:
    """Any thread may ask and tell.

    ``file`` keeps them across a reboot; None: they are kept in memory alone. ``notice`` gets
    ``api_addresses_unsaved`` (file, reason, action), once.
    """

    def __init__(
        self, file: Path | None = None, notice: Callable[..., None] = lambda *_, **__: None
    ) -> None:
        self._file = file
        self._notice = notice
        self._lock = threading.Lock()
        self._service: Service | None = None
        self._slices: dict[ObjectKey, EndpointSlice] = {}
        self._saved = _read(file)
        self._complained = False

    def others(self, server: str) -> Sequence[str]:
        """URLs where ``server``, an https URL, may be reached besides its own."""
        with self._lock:
            saved = self._saved
            return saved.others if saved is not None and saved.server == server else ()

    def learn(self, event: Event, server: str) -> None:
        """Take an event in; ``server`` is the configured URL, "" while it is not known."""
        if isinstance(event, Upserted):
            obj = event.obj
            if isinstance(obj, Service) and obj.key == SERVICE:
                with self._lock:
                    self._service = obj
                    self._update(server)
            elif (
                isinstance(obj, EndpointSlice)
                and obj.service == SERVICE.name
                and obj.namespace == SERVICE.namespace
            ):
                with self._lock:
                    self._slices[obj.key] = obj
                    self._update(server)
        elif isinstance(event, Deleted) and event.key in self._slices:
            with self._lock:
                del self._slices[event.key]
                self._update(server)

    def _update(self, server: str) -> None:
        if self._service is None or not _is_named_by(server, self._service):
            return
        urls = {f"https://{one}" for piece in self._slices.values() for one in _endpoints(piece)}
        saved = _Saved(server, tuple(sorted(urls)))
        if urls and saved != self._saved:
            self._saved = saved
            self._save(saved)

    def _save(self, saved: _Saved) -> None:
        if self._file is None:
            return
        new = self._file.with_name(f".{self._file.name}.new")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.json.encode(saved))
            new.replace(self._file)
        except OSError as error:
            if not self._complained:
                self._complained = True
                self._notice(
                    "api_addresses_unsaved",
                    file=str(self._file),
                    reason=error.strerror,
                    action="let it be written, or name the API server's own address (--master): "
                    "after a reboot it may not be found by its Service",
                )


def _read(file: Path | None) -> _Saved | None:
    """What was saved; a file that says something else says nothing."""
    if file is None:
        return None
    with contextlib.suppress(OSError, msgspec.MsgspecError, ValueError):
        saved = msgspec.json.decode(file.read_bytes(), type=_Saved)
        if all(_is_plain(url) for url in saved.others):
            return saved
    return None


def _is_plain(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme == "https" and bool(parts.hostname) and url == f"https://{parts.netloc}"


def _is_named_by(server: str, service: Service) -> bool:
    """Whether the URL names the server by its Service rather than by itself."""
    host = urlsplit(server).hostname or ""
    if host in {format_address(address) for address in service.cluster_ips}:
        return True
    return host in _NAMES or host.startswith("kubernetes.default.svc.")


def _endpoints(piece: EndpointSlice) -> list[str]:
    """``address:port`` of those that serve; the port is called https, or is the only one."""
    ports = [port.port for port in piece.ports if port.protocol is Protocol.TCP]
    named = [port.port for port in piece.ports if port.name == _PORT_NAME]
    port = (named or ports or [0])[0]
    return [
        format_endpoint(address, port)
        for address, state in zip(piece.addresses, piece.states, strict=True)
        if port and state != EndpointState.UNUSABLE
    ]
