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
import resource
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

import msgspec

from ebpflb import __version__, events, sysctls
from ebpflb.config import Config, planner_options
from ebpflb.configwatch import ConfigWatch
from ebpflb.datapath.base import Datapath
from ebpflb.datapath.ebpf.attach import cgroup2_root, is_root_of_all
from ebpflb.datapath.ebpf.datapath import EbpfDatapath
from ebpflb.datapath.ebpf.datapath import start as start_ebpf
from ebpflb.datapath.ebpf.libbpf import share_one_heap
from ebpflb.datapath.ebpf.options import EbpfOptions
from ebpflb.errors import DatapathError
from ebpflb.health import Health, HttpServer, Route, admin_routes, health_routes, json_response
from ebpflb.kubeproxy.schema import GROUP, as_builtins
from ebpflb.localcount import NoLocalEndpoints
from ebpflb.logs import Log
from ebpflb.metrics import Metrics
from ebpflb.model import (
    Address,
    Deleted,
    EndpointSlice,
    Event,
    HealthCheck,
    LocalAddresses,
    Node,
    NodePorts,
    ObjectKey,
    Refused,
    Rejected,
    ServicePortName,
    Synced,
    Upserted,
)
from ebpflb.node import AddressWatch
from ebpflb.nodelife import is_eligible, why_restart
from ebpflb.planner.options import PlannerOptions
from ebpflb.planner.plan import Planner
from ebpflb.programming import Programming
from ebpflb.servicehealth import ServiceHealth
from ebpflb.sources.manifests import ManifestSource
from ebpflb.synclog import SyncLog

_log = Log("agent")

RETRY_MIN_S = 1.0
RETRY_MAX_S = 30.0


class _Wake:
    """Something that was deferred can go on."""


class _Stop(NamedTuple):
    """End the loop; the data path stays. ``reason``: why the agent is to be started anew."""

    reason: str = ""


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
        min_sync_period_s: float = 0.0,
        why_restart: Callable[[Node | None, Node | None], str] = lambda _known, _now: "",
        tell: Callable[[events.Event], None] = lambda _event: None,
        waits_for_addresses: bool = False,
        follow: Callable[
            [Mapping[ObjectKey, HealthCheck], NodePorts], None
        ] = lambda _checks, _ports: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._planner = planner
        self._metrics = metrics
        self._health = health
        self._node_name = node_name
        self._audit_period_s = audit_period_s
        self._min_sync_period_s = min_sync_period_s
        self._why_restart = why_restart
        self._tell = tell
        self._clock = clock
        self._programming = Programming(time.time())
        self._no_local = NoLocalEndpoints()
        self._known_node: Node | None = None
        self._addresses: tuple[Address, ...] = ()  # the last that the Node had
        self._ending: _Stop | None = None
        self.node: Node | None = None
        """This node as it was last told; any thread may look."""
        self._queue: queue.SimpleQueue[Event | _Wake | _Stop] = queue.SimpleQueue()
        self._synced = False
        self._knows_addresses = not waits_for_addresses
        self._follow = follow
        self._compare_all = True  # not known to be as planned, whatever has changed
        self._deferred_at: dict[ServicePortName, float] = {}
        self._failed: dict[ServicePortName, DatapathError] = {}
        self._retry_s = RETRY_MIN_S
        self._retry_at: float | None = None
        self._audit_at = float("inf")
        self._sync_at = 0.0  # not before; what waits for it:
        self._is_due = self._woken = self._retry = False
        self._sync_log = SyncLog()

    def put(self, event: Event) -> None:
        self._health.queued()
        self._metrics.queued()
        self._queue.put(event)

    def wake(self) -> None:
        self._queue.put(_Wake())

    def stop(self, reason: str = "") -> None:
        self._queue.put(_Stop(reason))

    def failures(self) -> dict[str, str]:
        """Which service ports are not programmed as planned, and why. Any thread may ask."""
        return {str(name): str(error) for name, error in self._failed.copy().items()}

    def run(self, datapath: Datapath) -> str:
        """Until ``stop``, whose reason it returns. Raises DatapathError for what can never work."""
        while (stopping := self._turn(datapath)) is None:
            pass
        return stopping.reason

    def _turn(self, datapath: Datapath) -> _Stop | None:
        """Once around, when there is something to do; not None where it is to end."""
        events, woken, stopping = self._drain()
        if stopping is not None:
            return stopping
        now = self._clock()
        for event in events:
            self._apply(event)
        if self._ending is not None:
            return self._ending  # what is in force stays so until the next agent knows better
        self._woken |= woken
        self._retry |= self._retry_at is not None and now >= self._retry_at
        self._is_due |= bool(events) or self._woken or self._retry
        if self._is_ready and self._is_due and now >= self._sync_at:
            self._sync(datapath, woken=self._woken, retry=self._retry)
            self._is_due = self._woken = self._retry = False
            self._sync_at = self._clock() + self._min_sync_period_s  # SYNC-02
        if now >= self._audit_at:
            self._audit(datapath)
        return None

    def _drain(self) -> tuple[list[Event], bool, _Stop | None]:
        """Wait for something to do, then take all that there is."""
        events: list[Event] = []
        woken, stopping = False, None
        due = min(self._audit_at, self._retry_at or float("inf"))
        if self._is_ready and self._is_due:
            due = min(due, self._sync_at)
        timeout = None if due == float("inf") else max(0.0, due - self._clock())
        with contextlib.suppress(queue.Empty):
            item = self._queue.get(timeout=timeout)
            while True:
                if isinstance(item, _Wake):
                    woken = True
                elif isinstance(item, _Stop):
                    stopping = item
                else:
                    events.append(item)
                item = self._queue.get_nowait()
        if events:
            self._health.taken(len(events))
        return events, woken, stopping

    @property
    def _is_ready(self) -> bool:
        """Whether all is known that a plan needs; one made earlier would take things away."""
        return self._synced and self._knows_addresses

    def _apply(self, event: Event) -> None:
        if isinstance(event, LocalAddresses):
            self._knows_addresses = True
            self._planner.apply(event)
            return
        if isinstance(event, Synced):
            if not self._synced:
                self._health.begin()
            self._synced = True
            return
        key = event.obj.key if isinstance(event, Upserted) else event.key
        if key.kind == Node.__name__:
            if key.name != self._node_name:
                return
            self._follow_node(event)
            believed = self._believable(event)
            if believed is None:
                return
            event = believed
        elif isinstance(event, Upserted) and isinstance(event.obj, EndpointSlice):
            self._programming.changed(event.obj)
        elif key.kind == EndpointSlice.__name__:
            self._programming.deleted(key)
        self._metrics.event(key.kind)
        self._planner.apply(event)

    def _follow_node(self, event: Upserted | Deleted | Refused) -> None:
        if isinstance(event, Refused):
            return  # there is one, whatever it says
        now = event.obj if isinstance(event, Upserted) and isinstance(event.obj, Node) else None
        why = self._why_restart(self._known_node, now)
        self._known_node, self.node = self._known_node or now, now
        if why:
            self._ending = _Stop(why)

    def _believable(self, event: Upserted | Deleted | Refused) -> Upserted | Deleted | None:
        """What the plan is told of this node's Node; None: what was known stays in force.

        A Node that cannot be read, or has no addresses for a moment, is still this node: its
        NodePorts must not go for that.
        """
        if isinstance(event, Refused):
            rejected = Rejected(event.key, event.reason)
            _log.warning("not understood; what was known of it counts", **_told(rejected))
            self._tell(events.not_served(rejected))
            return None
        if isinstance(event, Upserted) and isinstance(event.obj, Node):
            if event.obj.addresses:
                self._addresses = event.obj.addresses
            else:
                return Upserted(msgspec.structs.replace(event.obj, addresses=self._addresses))
        return event

    def _sync(self, datapath: Datapath, *, woken: bool, retry: bool) -> None:
        started = self._clock()
        update = self._planner.update()
        self._no_local.changed(update.changed, update.plan)
        for one in update.rejected:
            _log.warning("not served", **_told(one))
            self._tell(events.not_served(one))
        for one in update.mended:
            _log.info("mended or gone", object=str(one.key), was=one.reason)
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
        self._follow(update.plan.health_checks, update.plan.node_ports)  # HC-08
        if self._audit_at == float("inf"):
            self._audit_at = self._clock() + self._audit_period_s
        # What waits is not programmed yet: of a failed one it is not known whether it will be.
        self._note(update.plan.ports.keys(), changed - report.deferred, report.failed)
        waits = (self._deferred_at.keys() - changed) | report.deferred
        self._deferred_at = {name: self._deferred_at.get(name, started) for name in waits}
        self._health.updated(min(self._deferred_at.values(), default=None))
        behind = self._deferred_at.keys() | self._failed.keys()
        for family, seconds in self._programming.synced(time.time(), behind):
            self._metrics.programmed(family, seconds)
        for family, count in self._no_local.counts.items():
            self._metrics.no_local_endpoints(
                family, internal=count.internal, external=count.external
            )
        duration = self._clock() - started
        self._metrics.synced(
            duration,
            writes=report.writes,
            service_ports=len(update.plan.ports),
            failed=len(self._failed),
        )
        if report.writes or compared_all:
            self._sync_log.done(
                self._clock(),
                duration_s=duration,
                service_ports=len(update.plan.ports),
                changed=len(update.changed),
                writes=report.writes,
                failed=len(self._failed),
                aloud=compared_all,
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
        self._sync_log.look(self._clock())
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


def _told(one: Rejected) -> dict[str, object]:
    return {"object": str(one.key), "reason": one.reason}


def _notice(event: str, /, **fields: object) -> None:
    _log.warning(event, **fields)


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


class _Source(Protocol):
    """Whence the agent knows the cluster's state; it emits from threads of its own."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def alive(self) -> bool: ...


class _Cluster(NamedTuple):
    """Where the state comes from, and where Events go; None where nobody takes any."""

    source: _Source
    recorder: events.Recorder | None


def _uses_pod_cidrs(config: Config) -> bool:
    """Whether pods are told by the Node's podCIDRs, which a start then waits for (SYNC-10)."""
    return config.kube_proxy.detect_local_mode == "NodeCIDR"


def _cluster(config: Config, emit: Callable[[Event], None], metrics: Metrics) -> _Cluster:
    """The manifests, where they were named, else the API server."""
    if config.manifests is not None:
        return _Cluster(ManifestSource(config.manifests, emit, notice=_notice), None)
    # TLS and HTTP cost memory that a node with manifests need not have.
    from ebpflb.sources.client import Client, Throttle  # noqa: PLC0415
    from ebpflb.sources.cluster import GOOD_NEWS, ApiSource, has_address  # noqa: PLC0415
    from ebpflb.sources.transport import Credentials, Where, load_access  # noqa: PLC0415

    def notice(event: str, /, **fields: object) -> None:
        (_log.info if event in GOOD_NEWS else _log.warning)(event, **fields)

    uses_pod_cidrs = _uses_pod_cidrs(config)
    where = Where(kubeconfig=config.kubeconfig, master=config.master)
    credentials = Credentials(lambda: load_access(where), notice)
    limits = config.kube_proxy.client_connection
    throttle = Throttle(limits.qps, limits.burst)
    source = ApiSource(
        credentials,
        emit,
        notice,
        node_name=config.node_name,
        metrics=metrics.api,
        requests=metrics.requests,
        throttle=throttle,
        node_ready=lambda node: has_address(node) and (not uses_pod_cidrs or bool(node.pod_cidrs)),
    )
    client = Client(credentials, throttle=throttle, metrics=metrics.requests)
    return _Cluster(source, events.Recorder(client.post, config.node_name, read=client.metadata))


def _ebpf_options(config: Config, plans_by: PlannerOptions, cgroup: Path) -> EbpfOptions:
    return EbpfOptions(
        pin_path=config.pin_path,
        cgroup=cgroup,
        map_sizes=config.map_sizes,
        show_service_tcp=config.show_service_tcp,
        protect_nodeports=config.protect_node_ports,
        socket_lb=config.socket_lb,
        devices=config.devices,
        pod_devices=config.pod_devices,
        ping=config.ping,
        keep_client_local=config.preserve_client_ip_local,
        masquerade_bit=config.masquerade_bit,
        reject_bit=config.reject_bit,
        tcp_timeout_s=config.tcp_established_timeout_s,
        tcp_closing_timeout_s=config.tcp_close_wait_timeout_s,
        agent={
            "planner": msgspec.to_builtins(plans_by),
            "protect_nodeports": config.protect_node_ports,
            "socket_lb": config.socket_lb,
            "devices": config.devices,
            "pod_devices": config.pod_devices,
            "manifests": str(config.manifests.resolve()) if config.manifests else "",
            "kubeconfig": config.kubeconfig,
            "master": config.master,
            "hostname": config.node_name,
            "cgroup": str(cgroup),
            "healthz_bind_address": config.healthz_bind_address,
            "metrics_bind_address": config.metrics_bind_address,
            "version": __version__,
        },
    )


_MANY_FILES = 65_536


def _allow_many_files() -> None:
    """Each health port is a descriptor of its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _MANY_FILES)), hard))


def _http_servers(
    config: Config,
    probes: Mapping[str, Route],
    admin: Mapping[str, Route],
    tell: Callable[[events.Event], None],
) -> Iterator[HttpServer]:
    for flag, address, routes in (
        ("--healthz-bind-address", config.healthz_bind_address, probes),
        ("--metrics-bind-address", config.metrics_bind_address, admin),
    ):
        if address:
            yield HttpServer(
                flag,
                address,
                routes,
                hard_fail=config.bind_address_hard_fail,
                failed=lambda flag, why: tell(events.cannot_listen(config.node_name, flag, why)),
            )


def run(config: Config) -> None:
    """Run until SIGTERM or SIGINT. Raises what the user must mend; exits 1 to be started anew."""
    share_one_heap()
    _allow_many_files()
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
    sysctls.set_oom_score_adj(config.kube_proxy.oom_score_adj)
    sysctls.set_conntrack(config.kube_proxy.conntrack)
    metrics = Metrics()
    health = Health(config.sync_period_s)
    uses_pod_cidrs = _uses_pod_cidrs(config)
    from_files = config.manifests is not None
    plans_by = planner_options(config)
    service_health = ServiceHealth(
        healthy=health.healthy,
        node_port_addresses=plans_by.node_port_addresses,
        failed=lambda key, port, why: tell(
            events.no_health_server(config.node_name, key, port, why)
        ),
    )
    loop = Loop(
        Planner(plans_by),
        metrics,
        health,
        node_name=config.node_name,
        audit_period_s=config.audit_period_s,
        min_sync_period_s=config.min_sync_period_s or 0.0,
        why_restart=lambda known, now: (
            "" if from_files else why_restart(known, now, uses_pod_cidrs=uses_pod_cidrs)
        ),
        tell=lambda event: tell(event),  # noqa: PLW0108 - it is made below, out of the loop's put
        waits_for_addresses=True,
        follow=service_health.follow,
    )
    addresses = AddressWatch(loop.put, _notice)
    source, recorder = _cluster(config, loop.put, metrics)
    tell: Callable[[events.Event], None] = recorder.tell if recorder else lambda _event: None
    options = _ebpf_options(config, plans_by, cgroup)
    datapath: EbpfDatapath | None = None
    probes = health_routes(
        health,
        is_eligible=lambda: (from_files and loop.node is None) or is_eligible(loop.node),
        answered=metrics.probed,
    )
    admin = admin_routes(
        exposition=metrics.exposition,
        mode="ebpf",
        configz={GROUP: as_builtins(config.kube_proxy)},
    ) | {
        "/failures": lambda: json_response(
            {**loop.failures(), **(datapath.problems() if datapath else {})}
        )
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(_on_signal(_end))  # a start may wait for the lock for long
        if recorder:
            recorder.start()
            stack.callback(recorder.close)
        tell(events.starting(config.node_name))
        for server in _http_servers(config, probes, admin, tell):
            stack.callback(server.close)
        if config.config_file is not None:
            changed = f"{config.config_file} says something else now"
            watch = ConfigWatch(
                config.config_file, config.config_content, lambda: loop.stop(changed)
            )
            watch.start()
            stack.callback(watch.stop)
        datapath = stack.enter_context(
            start_ebpf(
                options,
                loop.wake,
                lambda walk: metrics.stale_walked(
                    walk.duration_s, walk.cut, unreached=walk.unreached
                ),
            )
        )
        stack.enter_context(
            metrics.watching_kernel(datapath.counters, datapath.fill, datapath.flows)
        )
        stack.enter_context(_on_signal(loop.stop))
        stack.callback(service_health.close)
        stack.callback(addresses.stop)
        addresses.start()
        source.start()
        stack.callback(source.stop)
        health.depends_on(lambda: source.alive() and addresses.alive() and service_health.alive())
        reason = loop.run(datapath)
    if reason:
        _log.error("ended, to be started anew; the data path stays", reason=reason)
        raise SystemExit(1)
    _log.info("stopped")
