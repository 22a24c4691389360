# SPDX-License-Identifier: Apache-2.0
"""Where the kernel's maps could differ from those in memory: tries, and the page of settings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ebpflb.datapath.ebpf import audit
from ebpflb.datapath.ebpf.encode import SOURCE_RANGE_VALUE, encode_source_range
from ebpflb.datapath.ebpf.tables import Subnets, Tables, read
from ebpflb.datapath.ebpf.writer import Writer
from ebpflb.model import Plan, Upserted, parse_network
from tests.builders import at, endpoint_slice, new_planner, pod_ip, port_name, service
from tests.memory_tables import ManualGate
from tests.scenario.test_scenarios import kernel_tables

pytestmark = pytest.mark.root


@pytest.fixture
def tables() -> Iterator[Tables]:
    with kernel_tables(source_ranges=3) as opened:
        yield opened


def guarded(*ranges: str) -> Plan:
    planner = new_planner()
    planner.apply(Upserted(service(ingress_ips=["203.0.113.9"], source_ranges=ranges)))
    planner.apply(Upserted(endpoint_slice(at(pod_ip(2)))))
    return planner.update().plan


def test_a_full_trie_is_told_by_its_name_and_what_fits_is_there(tables: Tables) -> None:
    writer = Writer(tables, ManualGate())
    wanted = guarded(*(f"10.{number}.0.0/16" for number in range(4)))
    report = writer.sync(wanted, None)
    assert list(report.failed) == [port_name()]
    assert "--map-size source_ranges=N" in str(report.failed[port_name()])
    assert [one.what for one in audit.differences(wanted, read(tables))] == ["10.3.0.0/16"]
    narrower = guarded("10.3.1.0/24", "10.0.0.0/16")
    assert writer.sync(narrower, None).failed == {}
    assert audit.differences(narrower, read(tables)) == []
    assert writer.matches()


def test_a_network_in_another_is_an_entry_of_its_own(tables: Tables) -> None:
    writer = Writer(tables, ManualGate())
    for ranges in (["10.0.0.0/8", "10.1.0.0/16", "10.1.1.1/32"], ["10.1.0.0/16"], ["0.0.0.0/1"]):
        assert writer.sync(guarded(*ranges), None).failed == {}
        found = {str(one.network) for one in read(tables).source_ranges}
        assert found == set(ranges)


def test_a_trie_that_shrinks_while_it_is_read_is_read_to_its_end(tables: Tables) -> None:
    keys = [encode_source_range(parse_network(f"10.{number}.0.0/16"), 7) for number in range(3)]
    tables.source_ranges.update([(key, SOURCE_RANGE_VALUE) for key in keys])
    found = []
    for entry in tables.source_ranges.items():
        found.append(entry[0])
        tables.source_ranges.delete(entry[0])
    assert sorted(found) == sorted(keys)
    assert list(tables.source_ranges.items()) == []


def test_subnets_are_written_beside_the_flags(tables: Tables) -> None:
    subnets = Subnets(bytes(range(32)), bytes(range(32, 64)))
    tables.write_flags(1 << 40)
    tables.write_subnets(subnets)
    assert (tables.read_flags(), tables.read_subnets()) == (1 << 40, subnets)
