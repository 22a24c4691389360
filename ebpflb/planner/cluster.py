# SPDX-License-Identifier: Apache-2.0
"""The cluster as the events have told it, and which Services must be planned anew.

One entry a Service holds the Service (if there is one) and the slices that name it (if there are
any), so that neither order of arrival nor of deletion matters (EP-03, EP-09, EP-10). What is told
again without a difference makes nothing dirty. Of the nodes only this one is kept. This file must
not know what a plan is.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ebpflb.model import (
    Address,
    ApiObject,
    Deleted,
    EndpointSlice,
    Event,
    LocalAddresses,
    Node,
    ObjectKey,
    Refused,
    Service,
    Upserted,
)


class Entry(msgspec.Struct, gc=False):
    """What is known of one Service name; ``slices`` are in no particular order."""

    key: ObjectKey
    service: Service | None = None
    slices: tuple[EndpointSlice, ...] = ()


class Changes(msgspec.Struct):
    """What has changed since the last time it was asked.

    ``services``: the Service itself appeared, changed or went. ``endpoints``: its slices did.
    ``objects``: what is wrong with them may be something else now. ``here``: this node did, its
    Node object or the addresses of its interfaces.
    """

    services: set[ObjectKey] = msgspec.field(default_factory=set)
    endpoints: set[ObjectKey] = msgspec.field(default_factory=set)
    objects: set[ObjectKey] = msgspec.field(default_factory=set)
    here: bool = False


class Cluster:
    """State by object key, on the node ``node_name``; ``apply`` events, then ``take_changes``.

    ``node`` and ``local_addresses`` are what was told last of that node.
    """

    def __init__(self, node_name: str) -> None:
        self._node_name = node_name
        self.node: Node | None = None
        self.local_addresses: frozenset[Address] = frozenset()
        self._entries: dict[ObjectKey, Entry] = {}
        self._slices: dict[ObjectKey, EndpointSlice] = {}
        self._problems: dict[ObjectKey, tuple[str, ...]] = {}
        self._changes = Changes()

    def apply(self, event: Event) -> None:
        """Take in one event. A refused object counts as absent until it is mended."""
        if isinstance(event, Upserted):
            obj = event.obj
            self._set(obj.key, obj, obj.problems)
        elif isinstance(event, Deleted):
            self._set(event.key, None, ())
        elif isinstance(event, Refused):
            self._set(event.key, None, (event.reason,))
        elif isinstance(event, LocalAddresses) and event.addresses != self.local_addresses:
            self.local_addresses = event.addresses
            self._changes.here = True

    def take_changes(self) -> Changes:
        """Return what changed since the last call, and begin anew."""
        changes, self._changes = self._changes, Changes()
        return changes

    def entries(self) -> Iterator[Entry]:
        """Yield all that is known of each Service name."""
        yield from self._entries.values()

    def entry(self, key: ObjectKey) -> Entry | None:
        """Return what is known of the Service named ``key``, None for nothing at all."""
        return self._entries.get(key)

    def problems(self, key: ObjectKey) -> tuple[str, ...]:
        """Return what is wrong with the object, as its source found it."""
        return self._problems.get(key, ())

    def _set(self, key: ObjectKey, obj: ApiObject | None, problems: tuple[str, ...]) -> None:
        if self._problems.get(key, ()) != problems:
            self._changes.objects.add(key)
            if problems:
                self._problems[key] = problems
            else:
                del self._problems[key]
        if key.kind == "Service":
            self._set_service(key, obj if isinstance(obj, Service) else None)
        elif key.kind == "EndpointSlice":
            self._set_slice(key, obj if isinstance(obj, EndpointSlice) else None)
        elif key.name == self._node_name:
            self._set_node(obj if isinstance(obj, Node) else None)

    def _set_service(self, key: ObjectKey, service: Service | None) -> None:
        entry = self._entries.get(key)
        if service == (entry.service if entry else None):
            return
        self._changes.services.add(key)
        entry = self._known(key)
        entry.service = service
        self._forget_if_empty(entry)

    def _set_slice(self, key: ObjectKey, new: EndpointSlice | None) -> None:
        old = self._slices.get(key)
        if old == new:
            return
        if old is not None:
            entry = self._known(_service_key(old))
            entry.slices = tuple(each for each in entry.slices if each is not old)
            self._changes.endpoints.add(entry.key)
            self._forget_if_empty(entry)
            del self._slices[key]
        if new is not None:
            entry = self._known(_service_key(new))
            entry.slices = (*entry.slices, new)
            self._changes.endpoints.add(entry.key)
            self._slices[key] = new

    def _set_node(self, node: Node | None) -> None:
        if node != self.node:
            self.node = node
            self._changes.here = True

    def _known(self, key: ObjectKey) -> Entry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(key)
        return entry

    def _forget_if_empty(self, entry: Entry) -> None:
        if entry.service is None and not entry.slices:
            del self._entries[entry.key]


def _service_key(piece: EndpointSlice) -> ObjectKey:
    return ObjectKey("Service", piece.namespace, piece.service)
