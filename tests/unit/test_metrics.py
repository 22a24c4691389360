"""What /metrics says under kube-proxy's names: a row of the specification each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ebpflb.metrics import Metrics
from ebpflb.model import Family
from ebpflb.sources import client

SYNC_S = tuple(0.001 * 2**k for k in range(15))
PROGRAMMING_S = (*(0.25, 0.5), *range(1, 60), *range(60, 120, 5), *range(120, 301, 30))
REQUEST_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
BODY = (64, 256, 512, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216)


class Row(NamedTuple):
    met: str
    name: str
    type: str
    labels: set[str]
    buckets: tuple[float, ...] = ()


FAMILY = {"ip_family"}
ROWS = (
    Row("01", "kubeproxy_sync_proxy_rules_duration_seconds", "histogram", FAMILY, SYNC_S),
    Row("04", "kubeproxy_sync_proxy_rules_last_timestamp_seconds", "gauge", FAMILY),
    Row("05", "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds", "gauge", FAMILY),
    Row("06", "kubeproxy_network_programming_duration_seconds", "histogram", FAMILY, PROGRAMMING_S),
    Row("07", "kubeproxy_sync_proxy_rules_endpoint_changes_pending", "gauge", set()),
    Row("08", "kubeproxy_sync_proxy_rules_endpoint_changes_total", "counter", set()),
    Row("09", "kubeproxy_sync_proxy_rules_service_changes_pending", "gauge", set()),
    Row("10", "kubeproxy_sync_proxy_rules_service_changes_total", "counter", set()),
    Row(
        "17",
        "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
        "gauge",
        {"traffic_policy", "ip_family"},
    ),
    Row("22", "kubeproxy_conntrack_reconciler_sync_duration_seconds", "histogram", FAMILY, SYNC_S),
    Row("23", "kubeproxy_conntrack_reconciler_deleted_entries_total", "counter", FAMILY),
    Row("18", "kubeproxy_proxy_healthz_total", "counter", {"code"}),
    Row("19", "kubeproxy_proxy_livez_total", "counter", {"code"}),
    Row("27", "rest_client_requests_total", "counter", {"code", "method", "host"}),
    Row("27", "rest_client_request_retries_total", "counter", {"code", "verb", "host"}),
    Row("27", "rest_client_request_duration_seconds", "histogram", {"verb", "host"}, REQUEST_S),
    Row(
        "27", "rest_client_rate_limiter_duration_seconds", "histogram", {"verb", "host"}, REQUEST_S
    ),
    Row("27", "rest_client_request_size_bytes", "histogram", {"verb", "host"}, BODY),
    Row("27", "rest_client_response_size_bytes", "histogram", {"verb", "host"}, BODY),
    Row("27", "process_cpu_seconds_total", "counter", set()),
    Row("27", "process_resident_memory_bytes", "gauge", set()),
    Row("27", "process_start_time_seconds", "gauge", set()),
    Row("27", "process_open_fds", "gauge", set()),
)

Samples = dict[str, list[tuple[dict[str, str], float]]]


@pytest.fixture
def metrics() -> Metrics:
    """Metrics of an agent to which everything has happened once."""
    metrics = Metrics()
    for kind in ("Service", "EndpointSlice"):
        metrics.event(kind)
    metrics.queued()
    metrics.synced(0.01, writes=1, service_ports=1, failed=0)
    for family in Family:
        metrics.programmed(family, 0.3)
        metrics.no_local_endpoints(family, internal=3, external=4)
    for path in ("/healthz", "/livez"):
        metrics.probed(path, 200)
    requests: client.RequestMetrics = metrics.requests
    requests.throttled("GET", "10.0.0.1:6443", seconds=0.0)
    requests.answered("GET", "10.0.0.1:6443", code="200", again=True)
    requests.done("GET", "10.0.0.1:6443", seconds=0.1, sent=0, received=300)
    return metrics


def types_of(text: str) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))


def samples_of(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def labels_of(rows: Iterable[tuple[dict[str, str], float]]) -> set[str]:
    return {name for labels, _ in rows for name in labels} - {"le"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"MET-{row.met} {row.name}")
def test_a_metric_of_kube_proxys_has_its_name_type_labels_and_buckets(
    row: Row, metrics: Metrics
) -> None:
    text = metrics.exposition().decode()
    assert types_of(text)[row.name] == row.type
    samples = samples_of(text)
    found = samples[f"{row.name}_bucket" if row.type == "histogram" else row.name]
    assert labels_of(found) == row.labels
    if row.buckets:
        bounds = {float(labels["le"]) for labels, _ in found}
        assert sorted(bounds) == pytest.approx([*row.buckets, float("inf")])


def test_nothing_else_is_told_under_kube_proxys_names(metrics: Metrics) -> None:
    ours = re.compile(r"ebpflb_|python_|.*_created$")
    found = {name for name in types_of(metrics.exposition().decode()) if not ours.match(name)}
    assert found - {row.name for row in ROWS} == {
        "process_virtual_memory_bytes",
        "process_max_fds",
    }


def test_both_families_are_told(metrics: Metrics) -> None:
    samples = samples_of(metrics.exposition().decode())
    for row in ROWS:
        if "ip_family" in row.labels:
            name = f"{row.name}_count" if row.type == "histogram" else row.name
            assert {labels["ip_family"] for labels, _ in samples[name]} == {"IPv4", "IPv6"}


def test_service_ports_without_local_endpoints_are_told_by_scope(metrics: Metrics) -> None:
    metrics.no_local_endpoints(Family.IPV6, internal=0, external=1)
    name = "kubeproxy_sync_proxy_rules_no_local_endpoints_total"
    assert {
        (labels["ip_family"], labels["traffic_policy"]): value
        for labels, value in samples_of(metrics.exposition().decode())[name]
    } == {
        ("IPv4", "internal"): 3,
        ("IPv4", "external"): 4,
        ("IPv6", "internal"): 0,
        ("IPv6", "external"): 1,
    }


def test_a_request_without_an_answer_has_no_size_and_client_gos_code() -> None:
    metrics = Metrics()
    metrics.requests.answered("POST", "api:6443", code=client.NO_ANSWER, again=False)
    metrics.requests.done("POST", "api:6443", seconds=0.1, sent=900, received=None)
    samples = samples_of(metrics.exposition().decode())
    labels = {"code": "<error>", "method": "POST", "host": "api:6443"}
    assert samples["rest_client_requests_total"] == [(labels, 1)]
    assert samples["rest_client_request_size_bytes_sum"][0][1] == 900
    assert "rest_client_response_size_bytes_count" not in samples
    assert "rest_client_request_retries_total" not in samples


def test_kubernetes_own_versions_are_not_ours_to_tell() -> None:
    """Kubernetes' usual alert on mixed versions compares kubernetes_build_info of everybody."""
    assert "kubernetes_build_info" not in samples_of(Metrics().exposition().decode())


def test_the_kernels_counters_maps_and_flows_are_asked_at_each_scrape() -> None:
    metrics = Metrics()
    expired = {"idle": 3}
    with metrics.watching_kernel(
        lambda: {"dropped_policy": 7},
        lambda: {"conntrack": (20, 100)},
        lambda: ({"open": 9}, expired),
    ):
        expired["idle"] = 4
        lines = metrics.exposition().decode().splitlines()
    assert 'ebpflb_datapath_events_total{event="dropped_policy"} 7.0' in lines
    assert 'ebpflb_map_entries{map="conntrack"} 20.0' in lines
    assert 'ebpflb_map_max_entries{map="conntrack"} 100.0' in lines
    assert 'ebpflb_flows{state="open"} 9.0' in lines
    assert 'ebpflb_flows_expired_total{reason="idle"} 4.0' in lines
    assert "ebpflb_flows{" not in metrics.exposition().decode()
