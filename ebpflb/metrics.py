# SPDX-License-Identifier: Apache-2.0
"""What the agent measures, under kube-proxy's names where kube-proxy has one.

The only user of prometheus_client. Both families are programmed by one sync, so what kube-proxy
labels with a family is told for both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from ebpflb import __version__
from ebpflb.model import Family
from ebpflb.programming import BUCKETS_S, FINE_BUCKETS_S

_SYNC_BUCKETS = [0.001 * 2**k for k in range(15)]
_FINE_BUCKETS = [0.0001 * 2**k for k in range(16)]
# client-go's
_REQUEST_BUCKETS_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
_BODY_BUCKETS = (*(64, 256, 512), *(1024 * 4**k for k in range(8)))

MapFill = Mapping[str, tuple[int, int]]
"""(entries in use, entries in all) by map."""


Flows = tuple[Mapping[str, int], Mapping[str, int]]
"""Flows by state, and those that were taken out since the start by reason."""


def no_flows() -> Flows:
    """Of a datapath that keeps none."""
    return {}, {}


class _Kernel(Collector):
    """What is asked of the kernel only when somebody scrapes."""

    def __init__(
        self,
        counters: Callable[[], Mapping[str, int]],
        fill: Callable[[], MapFill],
        flows: Callable[[], Flows],
    ) -> None:
        self._counters = counters
        self._fill = fill
        self._flows = flows
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Ask no more; a scrape that is under way has ended when this returns."""
        with self._lock:
            self._closed = True

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            return [] if self._closed else self._collect()

    def _collect(self) -> list[Metric]:
        events = CounterMetricFamily(
            "ebpflb_datapath_events",
            "What the BPF programs did; foreign_backend and dropped_foreign must stay 0.",
            labels=["event"],
        )
        for name, value in self._counters().items():
            events.add_metric([name], value)
        used = GaugeMetricFamily("ebpflb_map_entries", "Entries in use of a map.", labels=["map"])
        size = GaugeMetricFamily("ebpflb_map_max_entries", "Entries of a map.", labels=["map"])
        for name, (entries, limit) in self._fill().items():
            used.add_metric([name], entries)
            size.add_metric([name], limit)
        states, reasons = self._flows()
        flows = GaugeMetricFamily(
            "ebpflb_flows", "Flows that packets' programs know, by state.", labels=["state"]
        )
        for state, count in states.items():
            flows.add_metric([state], count)
        expired = CounterMetricFamily(
            "ebpflb_flows_expired", "Flows that were over and were taken out.", labels=["reason"]
        )
        for reason, count in reasons.items():
            expired.add_metric([reason], count)
        return [events, used, size, flows, expired]


class ApiMetrics:
    """What the watches of the API server count, by resource. Any thread calls."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ["resource", *labels], registry=registry)

        self._bytes = counter("ebpflb_api_received_bytes", "Bytes of lists and watches.")
        self._events = counter("ebpflb_api_events", "Events that a watch brought.")
        self._lists = counter("ebpflb_api_lists", "Lists that came in whole.", "again")
        self._failures = counter(
            "ebpflb_api_failures", "Requests that failed.", "operation", "reason"
        )
        self._list_duration = Histogram(
            "ebpflb_api_list_duration_seconds",
            "How long a list took, all its pages.",
            ["resource"],
            registry=registry,
        )
        self._heard = Gauge(
            "ebpflb_api_last_heard_timestamp_seconds",
            "When a list, an event or a bookmark last came.",
            ["resource"],
            registry=registry,
        )

    def received(self, kind: str, size: int) -> None:
        self._bytes.labels(kind).inc(size)

    def heard(self, kind: str) -> None:
        self._heard.labels(kind).set_to_current_time()

    def event(self, kind: str) -> None:
        self._events.labels(kind).inc()

    def listed(self, kind: str, *, again: bool, seconds: float) -> None:
        self._lists.labels(kind, str(again).lower()).inc()
        self._list_duration.labels(kind).observe(seconds)

    def request_failed(self, kind: str, operation: str, reason: str) -> None:
        self._failures.labels(kind, operation, reason).inc()


class RequestMetrics:
    """What client-go counts of requests to the API server (MET-27). Any thread calls."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            labels = ["verb", "host"]
            return Histogram(
                f"rest_client_{name}", text, labels, buckets=tuple(buckets), registry=registry
            )

        self._answers = Counter(
            "rest_client_requests",
            "Requests by what was answered; <error> is no answer.",
            ["code", "method", "host"],
            registry=registry,
        )
        self._retries = Counter(
            "rest_client_request_retries",
            "Requests that were made again with other credentials, by what was answered then.",
            ["code", "verb", "host"],
            registry=registry,
        )
        self._durations = histogram(
            "request_duration_seconds",
            "How long a request took, its limit and its body too; watches are left out.",
            _REQUEST_BUCKETS_S,
        )
        self._waits = histogram(
            "rate_limiter_duration_seconds",
            "How long a request waited for the limit of requests.",
            _REQUEST_BUCKETS_S,
        )
        self._sent = histogram("request_size_bytes", "Bytes of a request's body.", _BODY_BUCKETS)
        self._received = histogram(
            "response_size_bytes", "Bytes of an answer's body, uncompressed.", _BODY_BUCKETS
        )

    def throttled(self, verb: str, host: str, *, seconds: float) -> None:
        self._waits.labels(verb, host).observe(seconds)

    def answered(self, verb: str, host: str, *, code: str, again: bool) -> None:
        self._answers.labels(code, verb, host).inc()
        if again:
            self._retries.labels(code, verb, host).inc()

    def done(
        self, verb: str, host: str, *, seconds: float, sent: int, received: int | None
    ) -> None:
        self._durations.labels(verb, host).observe(seconds)
        self._sent.labels(verb, host).observe(sent)
        if received is not None:
            self._received.labels(verb, host).observe(received)


class Metrics:
    """One registry; ``exposition`` is what /metrics answers."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self.api = ApiMetrics(registry)
        self.requests = RequestMetrics(registry)

        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, labels: Iterable[str] = ()) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        sync = "kubeproxy_sync_proxy_rules"
        self._duration = Histogram(
            f"{sync}_duration_seconds",
            "How long a sync took.",
            ["ip_family"],
            buckets=_SYNC_BUCKETS,
            registry=registry,
        )
        self._last = gauge(
            f"{sync}_last_timestamp_seconds", "When a sync last succeeded.", ["ip_family"]
        )
        self._queued = gauge(
            f"{sync}_last_queued_timestamp_seconds",
            "When a sync was last asked for.",
            ["ip_family"],
        )
        self._changes = {
            kind: counter(f"{sync}_{word}_changes", f"Changes of {kind}s seen.")
            for kind, word in (("Service", "service"), ("EndpointSlice", "endpoint"))
        }
        self._pending = {
            kind: gauge(f"{sync}_{word}_changes_pending", f"Changes of {kind}s not yet synced.")
            for kind, word in (("Service", "service"), ("EndpointSlice", "endpoint"))
        }
        self._fine_duration = Histogram(
            "ebpflb_sync_duration_seconds",
            "How long a sync took, from 0.1 ms.",
            buckets=_FINE_BUCKETS,
            registry=registry,
        )
        self._programming = Histogram(
            "kubeproxy_network_programming_duration_seconds",
            "From the change of an endpoint in the cluster until this node follows it.",
            ["ip_family"],
            buckets=BUCKETS_S,
            registry=registry,
        )
        self._fine_programming = Histogram(
            "ebpflb_network_programming_duration_seconds",
            "From the change of an endpoint in the cluster until this node follows it, from 1 ms.",
            ["ip_family"],
            buckets=FINE_BUCKETS_S,
            registry=registry,
        )
        for family in Family:
            self._programming.labels(family.label)
            self._fine_programming.labels(family.label)
        self._no_local_endpoints = gauge(
            f"{sync}_no_local_endpoints_total",
            "Service ports with a Local policy whose endpoints are all on other nodes.",
            ["traffic_policy", "ip_family"],
        )
        reconciler = "kubeproxy_conntrack_reconciler"
        self._walks = Histogram(
            f"{reconciler}_sync_duration_seconds",
            "How long a look for connected UDP sockets took whose backend serves no more.",
            ["ip_family"],
            buckets=_SYNC_BUCKETS,
            registry=registry,
        )
        self._cut = counter(
            f"{reconciler}_deleted_entries", "Such sockets that were destroyed.", ["ip_family"]
        )
        self._unreached = gauge(
            "ebpflb_stale_sockets_unreached",
            "Such sockets in network namespaces that could not be entered.",
        )
        for family in Family:
            self._walks.labels(family.label)
            self._cut.labels(family.label)
        self._writes = counter("ebpflb_map_writes", "Map entries written or deleted by syncs.")
        self._repairs = counter(
            "ebpflb_audit_repairs", "Differences that an audit found and repaired; should stay 0."
        )
        self._audits = counter("ebpflb_audits", "Audits made.")
        self._audit_failures = counter(
            "ebpflb_audit_failures", "Audits that failed; the next one tries again."
        )
        self._failures = counter(
            "ebpflb_map_write_failures", "Writes that failed.", ["map", "errno"]
        )
        self._service_ports = gauge("ebpflb_service_ports", "Service ports that are planned.")
        self._failed = gauge(
            "ebpflb_service_ports_failed", "Service ports that could not be programmed as planned."
        )
        self._rejected = gauge(
            "ebpflb_objects_rejected", "Objects that are not served, wholly or in part."
        )
        self._probes = {
            path: counter(f"kubeproxy_proxy_{path[1:]}", f"Answers of {path}.", ["code"])
            for path in ("/healthz", "/livez")
        }
        mode = gauge("ebpflb_build_info", "Version and mode; always 1.", ["version", "mode"])
        mode.labels(__version__, "ebpf").set(1)

    @contextmanager
    def watching_kernel(
        self,
        counters: Callable[[], Mapping[str, int]],
        fill: Callable[[], MapFill],
        flows: Callable[[], Flows] = no_flows,
    ) -> Iterator[None]:
        """Ask these functions at each scrape, from the server's thread, until this ends."""
        kernel = _Kernel(counters, fill, flows)
        self._registry.register(kernel)
        try:
            yield
        finally:
            self._registry.unregister(kernel)
            kernel.close()

    def event(self, kind: str) -> None:
        """An API object of ``kind`` changed and waits for a sync."""
        if kind in self._changes:
            self._changes[kind].inc()
            self._pending[kind].inc()

    def queued(self) -> None:
        """A sync is asked for (MET-31), whether or not anybody makes one. Any thread calls."""
        now = time.time()
        for family in Family:
            self._queued.labels(family.label).set(now)

    def synced(self, duration_s: float, *, writes: int, service_ports: int, failed: int) -> None:
        now = time.time()
        for family in Family:
            self._duration.labels(family.label).observe(duration_s)
            self._last.labels(family.label).set(now)
        self._fine_duration.observe(duration_s)
        for pending in self._pending.values():
            pending.set(0)
        self._writes.inc(writes)
        self._service_ports.set(service_ports)
        self._failed.set(failed)

    def programmed(self, family: Family, seconds: float) -> None:
        """A change of endpoints is in force, so long after it was made."""
        self._programming.labels(family.label).observe(seconds)
        self._fine_programming.labels(family.label).observe(seconds)

    def no_local_endpoints(self, family: Family, *, internal: int, external: int) -> None:
        """So many service ports drop what comes in a scope, for want of a local endpoint."""
        for scope, count in (("internal", internal), ("external", external)):
            self._no_local_endpoints.labels(scope, family.label).set(count)

    def stale_walked(self, seconds: float, cut: Mapping[Family, int], *, unreached: int) -> None:
        """Connected UDP sockets were looked through, of both families (MET-22, -23)."""
        for family in Family:
            self._walks.labels(family.label).observe(seconds)
            self._cut.labels(family.label).inc(cut.get(family, 0))
        self._unreached.set(unreached)

    def probed(self, path: str, status: int) -> None:
        """/healthz or /livez was answered."""
        self._probes[path].labels(str(status)).inc()

    def failure(self, thing: str, errno: str) -> None:
        self._failures.labels(thing, errno).inc()

    def rejected(self, objects: int) -> None:
        self._rejected.set(objects)

    def audited(self, repairs: int) -> None:
        self._audits.inc()
        self._repairs.inc(repairs)

    def audit_failed(self) -> None:
        self._audit_failures.inc()

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)
