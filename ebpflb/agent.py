# SPDX-License-Identifier: Apache-2.0
"""The agent: the one loop, the one owner of state.

Sources put events on a queue from threads of their own; here they are drained, planned and handed
to the datapath. Each step is level-triggered: a step that failed is tried again from the state
that is, not from the event that was. What a plan or a map looks like is not known here.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from http import HTTPStatus
from typing import NoReturn

from ebpflb import __version__
from ebpflb.config import Config
from ebpflb.datapath.base import Datapath
from ebpflb.datapath.ebpf.attach import cgroup2_root, is_root_of_all
from ebpflb.datapath.ebpf.datapath import EbpfOptions
from ebpflb.datapath.ebpf.datapath import start as start_ebpf
from ebpflb.errors import DatapathError
from ebpflb.health import Health, HttpServer, Response, Route, json_response, text
from ebpflb.logs import Log
from ebpflb.metrics import Metrics
from ebpflb.model import Event, Node, ServicePortName, Synced, Upserted
from ebpflb.planner.plan import Planner
from ebpflb.sources.manifests import ManifestSource

_log = Log("agent")

RETRY_MIN_S = 1.0
RETRY_MAX_S = 30.0


class _Wake:
    """Something that was deferred can go on."""


class _Stop:
    """End the loop; the data path stays."""


class Loop:
    """Events in, syncs out. ``put`` may be called from any thread, all else from one."""

    def __init__(
        self,
        planner: Planner,
        metrics: Metrics,
        health: Health,
        *,
        node_name: str,
        audit_period_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._planner = planner
        self._metrics = metrics
        self._health = health
        self._node_name = node_name
        self._audit_period_s = audit_period_s
        self._clock = clock
        self._queue: queue.SimpleQueue[Event | _Wake | _Stop] = queue.SimpleQueue()
        self._synced = False
        self._compare_all = True  # not known to be as planned, whatever has changed
        self._deferred_at: dict[ServicePortName, float] = {}
        self._failed: dict[ServicePortName, DatapathError] = {}
        self._retry_s = RETRY_MIN_S
        self._retry_at: float | None = None
        self._audit_at = float("inf")

    def put(self, event: Event) -> None:
        self._health.queued()
        self._queue.put(event)

    def wake(self) -> None:
        self._queue.put(_Wake())

    def stop(self) -> None:
        self._queue.put(_Stop())

    def failures(self) -> dict[str, str]:
        """Which service ports are not programmed as planned, and why. Any thread may ask."""
        return {str(name): str(error) for name, error in self._failed.copy().items()}

    def run(self, datapath: Datapath) -> None:
        """Until ``stop``. Raises DatapathError only for what can never work here."""
        while self._turn(datapath):
            pass

    def _turn(self, datapath: Datapath) -> bool:
        """Once around, when there is something to do; False where it is to end."""
        events, woken, stopping = self._drain()
        if stopping:
            return False
        now = self._clock()
        retry = self._retry_at is not None and now >= self._retry_at
        for event in events:
            self._apply(event)
        if self._synced and (events or woken or retry):
            self._sync(datapath, woken=woken, retry=retry)
        if now >= self._audit_at:
            self._audit(datapath)
        return True

    def _drain(self) -> tuple[list[Event], bool, bool]:
        """Wait for something to do, then take all that there is."""
        events: list[Event] = []
        woken = stopping = False
        due = min(self._audit_at, self._retry_at or float("inf"))
        timeout = None if due == float("inf") else max(0.0, due - self._clock())
        with contextlib.suppress(queue.Empty):
            item = self._queue.get(timeout=timeout)
            while True:
                if isinstance(item, _Wake):
                    woken = True
                elif isinstance(item, _Stop):
                    stopping = True
                else:
                    events.append(item)
                item = self._queue.get_nowait()
        if events:
            self._health.taken(len(events))
        return events, woken, stopping

    def _apply(self, event: Event) -> None:
        if isinstance(event, Synced):
            if not self._synced:
                self._health.begin()
            self._synced = True
            return
        key = event.obj.key if isinstance(event, Upserted) else event.key
        if key.kind == Node.__name__ and key.name != self._node_name:
            return
        self._metrics.event(key.kind)
        self._planner.apply(event)

    def _sync(self, datapath: Datapath, *, woken: bool, retry: bool) -> None:
        started = self._clock()
        update = self._planner.update()
        for one in update.rejected:
            _log.warning("not served", object=str(one.key), reason=one.reason)
        for one in update.mended:
            _log.info("served again", object=str(one.key), was=one.reason)
        self._metrics.rejected(self._planner.rejected_count)
        compared_all = self._compare_all
        changed = set(update.changed)
        if woken or compared_all:
            changed |= self._deferred_at.keys()
        if woken or retry or compared_all:  # what was released may be the room that was missing
            changed |= self._failed.keys()
        try:
            report = datapath.sync(update.plan, None if compared_all else changed)
        except DatapathError as error:
            if error.fatal:
                raise
            self._compare_all = True
            self._fail(error)
            return
        self._compare_all = False
        if self._audit_at == float("inf"):
            self._audit_at = self._clock() + self._audit_period_s
        # What waits is not programmed yet: of a failed one it is not known whether it will be.
        self._note(update.plan.ports.keys(), changed - report.deferred, report.failed)
        waits = (self._deferred_at.keys() - changed) | report.deferred
        self._deferred_at = {name: self._deferred_at.get(name, started) for name in waits}
        self._health.updated(min(self._deferred_at.values(), default=None))
        duration = self._clock() - started
        self._metrics.synced(
            duration,
            writes=report.writes,
            service_ports=len(update.plan.ports),
            failed=len(self._failed),
        )
        if report.writes or compared_all:
            _log.info(
                "synced",
                service_ports=len(update.plan.ports),
                changed=len(update.changed),
                writes=report.writes,
                failed=len(self._failed) or None,
                ms=round(duration * 1000, 1),
            )

    def _note(
        self,
        planned: Collection[ServicePortName],
        changed: Collection[ServicePortName],
        failed: Mapping[ServicePortName, DatapathError],
    ) -> None:
        for name, error in failed.items():
            self._metrics.failure(error.thing, errno.errorcode.get(error.errno, str(error.errno)))
            if str(self._failed.get(name)) != str(error):
                _log.error("not programmed", service=str(name), reason=str(error))
        for name in [n for n in self._failed if n in changed or n not in planned]:
            if name not in failed:
                _log.info("programmed now", service=str(name))
                del self._failed[name]
        self._failed.update(failed)
        if not self._failed:
            self._retry_at, self._retry_s = None, RETRY_MIN_S
        elif self._retry_at is None or self._clock() >= self._retry_at:
            self._retry_later()

    def _fail(self, error: DatapathError) -> None:
        _log.error("sync failed; trying again", reason=str(error), retry_s=self._retry_s)
        self._metrics.failure(error.thing, errno.errorcode.get(error.errno, str(error.errno)))
        self._retry_later()

    def _retry_later(self) -> None:
        self._retry_at = self._clock() + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)

    def _audit(self, datapath: Datapath) -> None:
        self._audit_at = self._clock() + self._audit_period_s
        try:
            found = datapath.audit(self._planner.plan)
        except DatapathError as error:  # also a fatal one: what is in force serves on
            _log.error(
                "audit failed; trying again", reason=str(error), retry_s=self._audit_period_s
            )
            self._metrics.audit_failed()
            self._compare_all = True  # it may have ended in the middle of a repair
            if self._retry_at is None:
                self._retry_later()
            return
        self._metrics.audited(len(found))
        for one in found[:20]:
            _log.error(
                "audit repaired a difference",
                service=one.service or None,
                where=one.where,
                what=one.what,
                expected=one.expected or None,
                actual=one.actual or None,
            )
        if len(found) > 20:
            _log.error("audit repaired more differences", more=len(found) - 20)


def _notice(event: str, /, **fields: object) -> None:
    _log.warning(event, **fields)


def _routes(
    health: Health, metrics: Metrics, loop: Loop, mode: str
) -> tuple[dict[str, Route], dict[str, Route]]:
    """What the health server and the metrics server answer, by path."""

    def livez() -> Response:
        status = HTTPStatus.OK if health.healthy() else HTTPStatus.SERVICE_UNAVAILABLE
        metrics.livez.labels(str(int(status))).inc()
        return json_response(health.body(node_eligible=None), status)

    def healthz() -> Response:
        status = HTTPStatus.OK if health.healthy() else HTTPStatus.SERVICE_UNAVAILABLE
        metrics.healthz.labels(str(int(status))).inc()
        return json_response(health.body(node_eligible=True), status)

    return (
        {"/healthz": healthz, "/livez": livez},
        {
            "/healthz": lambda: text("ok"),
            "/metrics": lambda: Response(
                HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8", metrics.exposition()
            ),
            "/proxyMode": lambda: text(mode),
            "/failures": lambda: json_response(loop.failures()),
        },
    )


@contextlib.contextmanager
def _on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call ``stop``, in the main thread, between two of its instructions.

    That may be in the middle of a line of the log, so nothing is said before all has been left.
    """
    came: list[signal.Signals] = []

    def on_signal(number: int, _frame: object) -> None:
        came.append(signal.Signals(number))
        stop()

    previous = {
        number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if came:
            _log.info("stopping; the data path stays", signal=came[0].name)


def _end() -> NoReturn:
    raise SystemExit(0)


def run(config: Config) -> None:
    """Run until SIGTERM or SIGINT. Raises what the user must mend."""
    cgroup = config.cgroup or cgroup2_root()
    _log.info(
        "starting", version=__version__, mode="ebpf", node=config.node_name, cgroup=str(cgroup)
    )
    if config.cgroup is None and not is_root_of_all(cgroup):
        _log.warning(
            "only the processes of this cgroup namespace are served; name the root of the host's "
            "cgroup v2 with --cgroup",
            cgroup=str(cgroup),
        )
    metrics = Metrics()
    health = Health(config.sync_period_s)
    loop = Loop(
        Planner(config.node_name),
        metrics,
        health,
        node_name=config.node_name,
        audit_period_s=config.audit_period_s,
    )
    options = EbpfOptions(
        pin_path=config.pin_path,
        cgroup=cgroup,
        map_sizes=config.map_sizes,
        show_service_tcp=config.show_service_tcp,
        agent={
            "manifests": str(config.manifests.resolve()),
            "hostname": config.node_name,
            "cgroup": str(cgroup),
            "healthz_bind_address": config.healthz_bind_address,
            "metrics_bind_address": config.metrics_bind_address,
            "version": __version__,
        },
    )
    health_routes, metrics_routes = _routes(health, metrics, loop, "ebpf")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_on_signal(_end))  # a start may wait for the lock for long
        for flag, address, routes in (
            ("--healthz-bind-address", config.healthz_bind_address, health_routes),
            ("--metrics-bind-address", config.metrics_bind_address, metrics_routes),
        ):
            if address:
                server = HttpServer(flag, address, routes, hard_fail=config.bind_address_hard_fail)
                stack.callback(server.close)
        source = ManifestSource(config.manifests, loop.put, notice=_notice)
        datapath = stack.enter_context(start_ebpf(options, loop.wake))
        stack.enter_context(metrics.watching_kernel(datapath.counters, datapath.fill))
        stack.enter_context(_on_signal(loop.stop))
        source.start()
        stack.callback(source.stop)
        health.depends_on(source.alive)
        loop.run(datapath)
    _log.info("stopped")
