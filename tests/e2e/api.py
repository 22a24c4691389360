# SPDX-License-Identifier: Apache-2.0
"""A client of the API server for tests: create, read, patch, replace, delete, as objects of JSON.

Plain HTTP from the standard library, on one connection that is kept. It must know nothing of the
agent, and shares no code with it: what one of them has misunderstood, the other shows.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from tests.builders import ApiObject

TIMEOUT_S: Final = 30.0
NAMESPACE: Final = "default"


class Kind(NamedTuple):
    """Where the objects of a kind are."""

    prefix: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str = NAMESPACE, name: str = "", subresource: str = "") -> str:
        where = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return "/".join(filter(None, [f"{self.prefix}{where}/{self.plural}", name, subresource]))


_RBAC: Final = "/apis/rbac.authorization.k8s.io/v1"
KINDS: Final[Mapping[str, Kind]] = {
    "Endpoints": Kind("/api/v1", "endpoints"),
    "Event": Kind("/apis/events.k8s.io/v1", "events"),
    "Node": Kind("/api/v1", "nodes", namespaced=False),
    "Pod": Kind("/api/v1", "pods"),
    "Secret": Kind("/api/v1", "secrets"),
    "Service": Kind("/api/v1", "services"),
    "ServiceAccount": Kind("/api/v1", "serviceaccounts"),
    "EndpointSlice": Kind("/apis/discovery.k8s.io/v1", "endpointslices"),
    "ClusterRole": Kind(_RBAC, "clusterroles", namespaced=False),
    "ClusterRoleBinding": Kind(_RBAC, "clusterrolebindings", namespaced=False),
}


class ApiError(Exception):
    """The server answered with a failure."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason


UNREACHABLE: Final = (OSError, http.client.HTTPException)
"""What a request raises when the server is not there, or goes away meanwhile."""


class _Connection(http.client.HTTPSConnection):
    """Connects in the way it is told."""

    def __init__(
        self, host: str, connect: Callable[[], socket.socket], tls: ssl.SSLContext
    ) -> None:
        super().__init__(host, timeout=TIMEOUT_S, context=tls)
        self._connect = connect
        self._tls = tls

    def connect(self) -> None:
        sock = self._connect()
        try:
            sock.settimeout(TIMEOUT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.sock = self._tls.wrap_socket(sock, server_hostname=self.host)
        except BaseException:
            sock.close()
            raise


class Api:
    """One user of the API server, named by a token. Threads take turns.

    connect: makes a connected TCP socket to the server, whose certificate is good for ``host``.
    """

    def __init__(
        self, host: str, connect: Callable[[], socket.socket], *, ca: Path, token: str
    ) -> None:
        self._connection = _Connection(host, connect, ssl.create_default_context(cafile=str(ca)))
        self._token = token
        self._lock = threading.Lock()

    def close(self) -> None:
        self._connection.close()

    def request(
        self,
        method: str,
        path: str,
        body: ApiObject | None = None,
        *,
        content: str = "application/json",
        query: Mapping[str, str] | None = None,
        raw: bool = False,
    ) -> Any:
        """The answer as JSON, or as text where it is ``raw`` or none.

        Raises ApiError, or UNREACHABLE.
        """
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content
        target = f"{path}?{urlencode(query)}" if query else path
        data = None if body is None else json.dumps(body).encode()
        with self._lock:
            try:
                self._send(method, target, data, headers)
                answer = self._connection.getresponse()
                status, text = answer.status, answer.read()
            except BaseException:
                self._connection.close()
                raise
        said: Any = text.decode()
        with contextlib.suppress(ValueError):
            said = said if raw and status < 400 else json.loads(text)
        if status >= 400:
            told = said if isinstance(said, dict) else {}
            raise ApiError(status, told.get("reason", "?"), told.get("message", str(said)))
        return said

    def _send(
        self, method: str, target: str, data: bytes | None, headers: Mapping[str, str]
    ) -> None:
        """A connection that the server has closed meanwhile takes nothing: that is tried anew."""
        try:
            self._connection.request(method, target, data, dict(headers))
        except UNREACHABLE:
            self._connection.close()
            self._connection.request(method, target, data, dict(headers))

    # --- objects --------------------------------------------------------------------------------

    def create(self, obj: ApiObject, *, status: ApiObject | None = None) -> ApiObject:
        """Create it; with ``status``, give it that too. Returns it as the server has it."""
        kind, meta = KINDS[obj["kind"]], obj["metadata"]
        made: ApiObject = self.request("POST", kind.path(meta.get("namespace", NAMESPACE)), obj)
        return self.patch_status(made, status) if status is not None else made

    def get(self, kind: str, name: str, *, namespace: str = NAMESPACE) -> ApiObject:
        found: ApiObject = self.request("GET", KINDS[kind].path(namespace, name))
        return found

    def list(self, kind: str, *, namespace: str = NAMESPACE, labels: str = "") -> list[ApiObject]:
        """All objects of a kind, in one namespace or ("") in all; ``labels`` is a selector."""
        query = {"labelSelector": labels} if labels else None
        found: list[ApiObject] = self.request("GET", KINDS[kind].path(namespace), query=query)[
            "items"
        ]
        return found

    def version(self, kind: str, *, namespace: str = NAMESPACE) -> str:
        """The version of the state, from which a watch would go on."""
        found = self.request("GET", KINDS[kind].path(namespace), query={"limit": "1"})
        version: str = found["metadata"]["resourceVersion"]
        return version

    def watched(self, kind: str, *, since: str, namespace: str = NAMESPACE) -> str:
        """What a watch from that version tells within a second, as it comes."""
        query = {"watch": "true", "resourceVersion": since, "timeoutSeconds": "1"}
        return str(self.request("GET", KINDS[kind].path(namespace), query=query, raw=True))

    def patch(
        self, kind: str, name: str, change: ApiObject, *, namespace: str = NAMESPACE, sub: str = ""
    ) -> ApiObject:
        """A merge patch: None deletes a key, a list replaces the one that was there."""
        path = KINDS[kind].path(namespace, name, sub)
        content = "application/merge-patch+json"
        made: ApiObject = self.request("PATCH", path, change, content=content)
        return made

    def patch_status(self, obj: ApiObject, status: ApiObject) -> ApiObject:
        meta = obj["metadata"]
        return self.patch(
            obj["kind"],
            meta["name"],
            {"status": status},
            namespace=meta.get("namespace", NAMESPACE),
            sub="status",
        )

    def replace(self, obj: ApiObject) -> ApiObject:
        """PUT: what it does not have is gone."""
        meta = obj["metadata"]
        path = KINDS[obj["kind"]].path(meta.get("namespace", NAMESPACE), meta["name"])
        made: ApiObject = self.request("PUT", path, obj)
        return made

    def delete(
        self,
        kind: str,
        name: str,
        *,
        namespace: str = NAMESPACE,
        grace_s: int | None = None,
    ) -> None:
        """Delete it; that it is gone already is no error."""
        options = None if grace_s is None else {"gracePeriodSeconds": grace_s}
        try:
            self.request("DELETE", KINDS[kind].path(namespace, name), options)
        except ApiError as error:
            if error.status != 404:
                raise

    def delete_all(self, kind: str, *, labels: str, namespace: str = NAMESPACE) -> None:
        """One by one where the server cannot at once."""
        for found in self.list(kind, namespace=namespace, labels=labels):
            self.delete(kind, found["metadata"]["name"], namespace=namespace, grace_s=0)


def named(objects: Iterable[ApiObject]) -> set[str]:
    """The names of some objects."""
    return {one["metadata"]["name"] for one in objects}
