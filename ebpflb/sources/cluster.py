# SPDX-License-Identifier: Apache-2.0
"""Services, EndpointSlices and this Node from the API server: three watches, told as one source.

Here is decided what is asked for, when everything has been told, and what is said of a server that
cannot be reached: one line when it is lost and one when it is back, whatever the number of tries.
Losing it ends nothing. This file must not know HTTP, nor what an object means.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from ebpflb.model import Event, Node, Synced, Upserted
from ebpflb.sources import wire
from ebpflb.sources.addresses import Addresses
from ebpflb.sources.client import Client, RequestMetrics, Throttle
from ebpflb.sources.failures import ApiError, Reason
from ebpflb.sources.transport import Credentials
from ebpflb.sources.watch import Operation, Resource, Timing, Watch, WatchMetrics

Notice = Callable[..., None]
"""Where messages go: an event's name, and what a person needs to know as fields."""

GOOD_NEWS: Final = frozenset({"api_back"})
"""The events that tell of nothing bad; all others ask for somebody's attention."""

_NEEDED: Final = frozenset({"Service", "EndpointSlice"})  # SYNC-01
_STOP_S: Final = 1.0


def resources(node_name: str) -> tuple[Resource, ...]:
    """SVC-01 to -03 and SYNC-12: what is not for us is not even asked for."""
    return (
        Resource(
            "Service",
            "/api/v1/services",
            {
                "labelSelector": "!service.kubernetes.io/service-proxy-name",
                "fieldSelector": "spec.clusterIP!=None",
            },
            optional=frozenset({"fieldSelector"}),
        ),
        Resource(
            "EndpointSlice",
            "/apis/discovery.k8s.io/v1/endpointslices",
            {"labelSelector": "!service.kubernetes.io/headless"},
        ),
        Resource(
            "Node",
            "/api/v1/nodes",
            {"fieldSelector": f"metadata.name={node_name}"},
        ),
    )


def has_address(node: Node) -> bool:
    """SYNC-10: a Node without addresses is one that is still being made."""
    return bool(node.addresses)


class NoMetrics:
    """Counts nothing."""

    def received(self, kind: str, size: int) -> None: ...
    def heard(self, kind: str) -> None: ...
    def event(self, kind: str) -> None: ...
    def listed(self, kind: str, *, again: bool, seconds: float) -> None: ...
    def request_failed(self, kind: str, operation: Operation, reason: str) -> None: ...


class ApiSource:
    """Tells ``emit`` what the API server has, and how that changes.

    Synced follows when Services and EndpointSlices have been listed in full and this Node is there
    and ``node_ready``; for the Node ``timing.node_s`` is waited at most (SYNC-10), and only
    ``timing.forbidden_s`` where we may not read it. ``emit`` and ``notice`` are called on the
    watches' threads, ``emit`` on one at a time. The notices:

    * ``api_lost``: server, resource (None: it is about the server or our credentials as such),
      reason, action; ``api_back``: resource, lost_s;
    * ``api_list_doubted``: resource, known, listed, action;
    * ``node_missing``: node, waited_s, action;
    * those of Credentials and of Addresses.
    """

    def __init__(
        self,
        credentials: Credentials,
        emit: Callable[[Event], None],
        notice: Notice,
        *,
        node_name: str,
        metrics: WatchMetrics | None = None,
        requests: RequestMetrics | None = None,
        throttle: Throttle | None = None,
        addresses: Addresses | None = None,
        timing: Timing | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        node_ready: Callable[[Node], bool] = has_address,
    ) -> None:
        self._timing = timing or Timing()
        self._told = _Told(
            emit,
            notice,
            Outages(notice, clock),
            addresses or Addresses(),
            node_name=node_name,
            node_ready=node_ready,
            reached=self._nudge_others,
        )
        self._node_timer = threading.Timer(
            self._timing.node_s, self._told.waited_for_node, [self._timing.node_s]
        )
        self._node_timer.daemon = True
        self._stopping = threading.Event()
        self._clients: list[Client] = []
        self._watches: dict[wire.Kind, Watch] = {}
        self._threads: list[threading.Thread] = []
        for resource in resources(node_name):
            client = Client(
                credentials,
                others=self._told.others,
                connect_timeout_s=self._timing.connect_s,
                throttle=throttle,
                metrics=requests,
            )
            watch = Watch(
                resource,
                client,
                self._told,
                metrics or NoMetrics(),
                self._stopping,
                timing=self._timing,
                clock=clock,
                rng=rng,
            )
            self._clients.append(client)
            self._watches[resource.kind] = watch
            self._threads.append(
                threading.Thread(target=watch.run, name=f"watch-{resource.kind}", daemon=True)
            )

    def start(self) -> None:
        """Begin to watch, on threads of their own."""
        self._node_timer.start()
        for thread in self._threads:
            thread.start()

    def alive(self) -> bool:
        """Whether all threads watch; one that ended without ``stop`` is a fault of ours."""
        return all(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """End the watching; nothing is emitted after this returns.

        A thread in the middle of a connect is not waited for long; it ends by itself.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._told.close()
        self._node_timer.cancel()
        for watch in self._watches.values():
            watch.nudge()
        for client in self._clients:
            client.interrupt()
        deadline = time.monotonic() + _STOP_S
        for client, thread in zip(self._clients, self._threads, strict=True):
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
            if not thread.is_alive():
                client.close()

    def _nudge_others(self, kind: wire.Kind) -> None:
        """The watch of ``kind`` has reached the server: nobody need wait for it any more."""
        for other, watch in self._watches.items():
            if other != kind:
                watch.nudge()


def load(credentials: Credentials, *, node_name: str, timing: Timing | None = None) -> list[Event]:
    """Return what the API server has now, Synced at the end, without watching it.

    Raises SourceError where one of the three cannot be listed.
    """
    timing = timing or Timing()
    events: list[Event] = []
    told = _Told(
        events.append,
        _say_nothing,
        Outages(_say_nothing, time.monotonic),
        Addresses(),
        node_name=node_name,
        node_ready=has_address,
    )
    client = Client(credentials, connect_timeout_s=timing.connect_s)
    try:
        for resource in resources(node_name):
            stopping = threading.Event()
            Watch(resource, client, told, NoMetrics(), stopping, timing=timing).list_once()
    finally:
        client.close()
    told.waited_for_node(0.0)
    return events


def _say_nothing(_event: str, /, **_fields: object) -> None:
    """Nobody is there to read it."""


class _Told:
    """What the three watches say, made into one source; takes it from any of their threads."""

    def __init__(
        self,
        emit: Callable[[Event], None],
        notice: Notice,
        outages: Outages,
        addresses: Addresses,
        *,
        node_name: str,
        node_ready: Callable[[Node], bool],
        reached: Callable[[wire.Kind], None] = lambda _kind: None,
    ) -> None:
        self._emit = emit
        self._notice = notice
        self._outages = outages
        self._addresses = addresses
        self._node_name = node_name
        self._node_ready = node_ready
        self._reached = reached
        self._server = ""
        self._lock = threading.Lock()
        self._closed = False
        self._listed: set[str] = set()
        self._node_known = False
        self._synced = False

    def close(self) -> None:
        """Emit nothing any more."""
        with self._lock:
            self._closed = True

    def others(self, server: str) -> Sequence[str]:
        """Where the API server may be reached besides ``server``, which was configured."""
        self._server = server
        return self._addresses.others(server)

    def changed(self, told: wire.Told) -> None:
        self._addresses.learn(told, self._server)
        with self._lock:
            if self._closed:
                return
            self._emit(told)
            if isinstance(told, Upserted) and isinstance(told.obj, Node):
                self._node_known = self._node_known or self._node_ready(told.obj)
                self._sync()

    def listed(self, kind: wire.Kind) -> None:
        with self._lock:
            self._listed.add(kind)
            self._sync()

    def works(self, kind: wire.Kind, *, stream: bool) -> None:
        if not stream:
            self._reached(kind)
        self._outages.works(kind, stream=stream)

    def failed(
        self, kind: wire.Kind, operation: Operation, error: ApiError, *, row: int, stream: bool
    ) -> None:
        self._outages.failed(kind, operation, error, row=row, stream=stream)
        if kind == "Node" and error.reason == "forbidden":  # it is told when it lasts
            with self._lock:
                self._node_known = True
                self._sync()

    def doubted(self, kind: wire.Kind, *, known: int, listed: int) -> None:
        self._notice(
            "api_list_doubted",
            resource=kind,
            known=known,
            listed=listed,
            action="asked for again before anything is deleted",
        )

    def waited_for_node(self, waited_s: float) -> None:
        """Go on without the Node."""
        with self._lock:
            if self._node_known or self._closed:
                return
            self._node_known = True
            self._notice(
                "node_missing",
                node=self._node_name,
                waited_s=waited_s,
                action="going on without its zone and addresses; if this is not the Node's name, "
                "give --hostname-override",
            )
            self._sync()

    def _sync(self) -> None:
        if self._node_known and self._listed >= _NEEDED and not self._synced and not self._closed:
            self._synced = True
            self._emit(Synced())


# --- what is said of failures ---------------------------------------------------------------------

_QUIET_S: Final = 60.0
_ROW: Final = 3
"""A stream that breaks is nothing to speak of; so many in a row that came to nothing are."""

_STAYS: Final = "trying again; what is known stays in force"
_ACTIONS: Final[Mapping[Reason, str]] = {
    "credentials": f"mend it; {_STAYS}",
    "tls": "compare the kubeconfig's certificate-authority (or the service account's ca.crt) and "
    f"address with the server's certificate; {_STAYS}",
    "unauthorized": "renew the kubeconfig's credentials or look at the service account's token; "
    f"they are read anew at each try; {_STAYS}",
    "forbidden": f"grant list and watch on it, as system:node-proxier does; {_STAYS}",
    "missing": f"Kubernetes 1.21 or newer is needed (discovery.k8s.io/v1); {_STAYS}",
}


class _Outage(msgspec.Struct):
    """``affected``: which resources, and whether it is their stream; ``told``: of which reasons."""

    since: float
    affected: dict[str, bool]
    told: set[str]


class Outages:
    """One line when something is lost, one for each further reason, one when it is back.

    What concerns the server as such is told once for all resources. The same is said once a minute
    at most, so that a server that comes and goes does not fill the log. Any thread may call.
    """

    def __init__(self, notice: Notice, clock: Callable[[], float]) -> None:
        self._notice = notice
        self._clock = clock
        self._lock = threading.Lock()
        self._outages: dict[str, _Outage] = {}
        self._last_told: dict[tuple[str, str], float] = {}

    def failed(
        self, kind: str, operation: Operation, error: ApiError, *, row: int, stream: bool
    ) -> None:
        if stream and row < _ROW:
            return
        scope = "" if error.shared else kind
        with self._lock:
            now = self._clock()
            outage = self._outages.setdefault(scope, _Outage(now, {}, set()))
            outage.affected[kind] = stream
            last = self._last_told.get((scope, error.reason), float("-inf"))
            if error.reason in outage.told or now - last < _QUIET_S:
                return
            outage.told.add(error.reason)
            self._last_told[scope, error.reason] = now
        self._notice(
            "api_lost",
            server=error.server or None,
            resource=scope or None,
            operation=operation if scope else None,
            reason=error.text,
            action=_ACTIONS.get(error.reason, _STAYS),
        )

    def works(self, kind: str, *, stream: bool) -> None:
        if not self._outages:
            return
        back: list[tuple[str, float]] = []
        with self._lock:
            for scope in [scope for scope in self._outages if scope in {"", kind}]:
                outage = self._outages[scope]
                if outage.affected.get(kind) is False or stream:
                    outage.affected.pop(kind, None)
                if not outage.affected:
                    del self._outages[scope]
                    if outage.told:
                        back.append((scope, self._clock() - outage.since))
        for scope, lost_s in back:
            self._notice("api_back", resource=scope or None, lost_s=round(lost_s, 1))
