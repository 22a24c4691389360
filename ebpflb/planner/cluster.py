# SPDX-License-Identifier: Apache-2.0
"""The cluster as the events have told it, and which Services must be planned anew.

One entry a Service holds the Service (if there is one) and the slices that name it (if there are
any), so that neither order of arrival nor of deletion matters (EP-03, EP-09, EP-10). What is told
again without a difference makes nothing dirty. This file must not know what a plan is.
"""

from __future__ import annotations

import msgspec

from ebpflb.model import (
    ApiObject,
    Deleted,
    EndpointSlice,
    Event,
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


class Changes(msgspec.Struct, frozen=True):
    """What has changed since the last time it was asked.

    ``services``: the Service itself appeared, changed or went. ``endpoints``: its slices did.
    ``objects``: what is wrong with them may be something else now.
    """

    services: set[ObjectKey]
    endpoints: set[ObjectKey]
    objects: set[ObjectKey]


class Cluster:
    """State by object key; ``apply`` events, then ``take_changes``."""

    def __init__(self) -> None:
        self._entries: dict[ObjectKey, Entry] = {}
        self._slices: dict[ObjectKey, EndpointSlice] = {}
        self._problems: dict[ObjectKey, tuple[str, ...]] = {}
        self._changes = Changes(set(), set(), set())

    def apply(self, event: Event) -> None:
        """Take in one event. A refused object counts as absent until it is mended."""
        if isinstance(event, Upserted):
            obj = event.obj
            self._set(obj.key, obj, obj.problems)
        elif isinstance(event, Deleted):
            self._set(event.key, None, ())
        elif isinstance(event, Refused):
            self._set(event.key, None, (event.reason,))

    def take_changes(self) -> Changes:
        """Return what changed since the last call, and begin anew."""
        changes, self._changes = self._changes, Changes(set(), set(), set())
        return changes

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
