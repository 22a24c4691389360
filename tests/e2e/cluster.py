# SPDX-License-Identifier: Apache-2.0
"""A control plane of real parts on a node of the lab: etcd, kube-apiserver, controllers.

RBAC is on, and what the agent may do is what `AGENT_RULES` says. Each part can be killed and
started again; what the lab's end does not take (processes, files) there is none of. It must know
nothing of the agent but those rules.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

import yaml

from ebpflb.lab import LabError, Node, addresses, wait_until
from tests.builders import ApiObject
from tests.e2e import binaries
from tests.e2e.api import UNREACHABLE, Api, ApiError

PORT: Final = 6443
ETCD_PORT: Final = 2379
READY_S: Final = 90.0
ADMIN_TOKEN: Final = "admin-of-the-lab"
SYSTEM: Final = "kube-system"
AGENT: Final = "ebpflb"

_RBAC: Final = Path(__file__).parents[2] / "deploy" / "base" / "rbac.yaml"
AGENT_OBJECTS: Final[Sequence[ApiObject]] = tuple(yaml.safe_load_all(_RBAC.read_text()))
"""The agent's service account and its rights, as they are shipped."""

(AGENT_RULES,) = (one["rules"] for one in AGENT_OBJECTS if one["kind"] == "ClusterRole")

_CERTIFICATES = """\
[req]
distinguished_name = name
[name]
[ca]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {names}
"""

# Everything that the agent asks for, and nothing of anybody else.
_AUDIT_POLICY: Final[ApiObject] = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "Panic"],
    "rules": [
        {"level": "Metadata", "users": [f"system:serviceaccount:{SYSTEM}:{AGENT}"]},
        {"level": "None"},
    ],
}


class Part:
    """One program of the control plane. ``alive`` says whether it has the word."""

    def __init__(self, node: Node, name: str, arguments: Callable[[], Sequence[str]]) -> None:
        self.name = name
        self.log_path = node.lab.folder / f"{name}.log"
        self._node = node
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it and wait for nothing."""
        assert not self.alive, f"{self.name} runs already"
        folder = self._node.lab.folder
        with self.log_path.open("ab") as log:
            self._process = self._node.popen(
                [binaries.folder() / self.name, *self._arguments()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                # Nothing of the caller's, a proxy least of all.
                env={"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder)},
            )

    def kill(self) -> None:
        """End it as a power cut does."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it in order."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        assert self._process is not None, f"{self.name} was never started"
        self._process.send_signal(number)
        self._process.wait(READY_S)

    def wait(self, ready: Callable[[], bool], *, timeout_s: float = READY_S) -> None:
        """Wait until ``ready()``. Raises LabError with its last words when it ends, or is late."""

        def look() -> bool:
            return not self.alive or ready()

        with self._last_words():
            wait_until(look, timeout_s=timeout_s, what=f"{self.name} is ready")
            if not self.alive:
                raise LabError(f"{self.name} ended")

    @contextlib.contextmanager
    def _last_words(self) -> Iterator[None]:
        try:
            yield
        except LabError as error:
            error.add_note(self.tail())
            raise

    def tail(self, lines: int = 40) -> str:
        """The end of its log."""
        if not self.log_path.exists():
            return ""
        text = self.log_path.read_text(errors="replace")
        return "\n".join(line[:400] for line in text.splitlines()[-lines:])


class Cluster:
    """The control plane on ``node``; a context manager that starts etcd and the API server.

    ``admin`` may do everything. ``watch_cache``: whether the API server answers watches from
    memory, as it does by default, or lets etcd answer each.
    """

    def __init__(self, node: Node, *, watch_cache: bool = True) -> None:
        self.node = node
        self.folder = node.lab.folder
        self.watch_cache = watch_cache
        self.etcd = Part(node, "etcd", self._etcd_arguments)
        self.apiserver = Part(node, "kube-apiserver", self._apiserver_arguments)
        self.controllers = Part(node, "kube-controller-manager", self._controllers_arguments)
        self.ca = self.folder / "ca.crt"
        self._make_files()
        self.admin = self.client(ADMIN_TOKEN)

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.etcd, self.apiserver, self.controllers

    @property
    def server(self) -> str:
        """The API server's URL, as nodes reach it."""
        return f"https://{self.node.ipv4}:{PORT}"

    @property
    def server_v6(self) -> str:
        return f"https://[{self.node.ipv6}]:{PORT}"

    def __enter__(self) -> Self:
        self.start()
        for obj in AGENT_OBJECTS:
            self.admin.create(obj)
        return self

    def __exit__(self, *_: object) -> None:
        self.admin.close()
        for part in reversed(self.parts):
            if part.alive:
                part.kill()

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start what of etcd and the API server does not run, and wait for both."""
        for part in (self.etcd, self.apiserver):
            if not part.alive:
                part.start()
        self.etcd.wait(self._etcd_serves)
        self.apiserver.wait(self._apiserver_serves)

    def start_controllers(self) -> None:
        """Let the real controllers write EndpointSlices, from now on."""
        if not self.controllers.alive:
            self.controllers.start()

    def _etcd_serves(self) -> bool:
        try:
            return bool(self.ask_etcd("/v3/maintenance/status", {}))
        except OSError:
            return False

    def _apiserver_serves(self) -> bool:
        try:
            self.admin.request("GET", "/readyz")
            # What it makes by itself after it is ready: then it can give out addresses too.
            self.admin.get("Service", "kubernetes")
            self.admin.request("GET", f"/api/v1/namespaces/{SYSTEM}")
        except (ApiError, *UNREACHABLE):
            return False
        return True

    # --- who may do what ------------------------------------------------------------------------

    def client(self, token: str) -> Api:
        """A client of the API server with this token."""

        def connect() -> socket.socket:
            return self.node.inside(
                lambda: socket.create_connection((self.node.ipv4, PORT), timeout=5)
            )

        return Api(self.node.ipv4, connect, ca=self.ca, token=token)

    def agent_token(self, name: str) -> str:
        """A token of the agent's service account, good until ``revoke(name)``."""
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "namespace": SYSTEM},
        }
        made = self.admin.create(secret)
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {
                "boundObjectRef": {
                    "apiVersion": "v1",
                    "kind": "Secret",
                    "name": name,
                    "uid": made["metadata"]["uid"],
                }
            },
        }
        path = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/{AGENT}/token"
        token: str = self.admin.request("POST", path, request)["status"]["token"]
        return token

    def revoke(self, name: str) -> None:
        """Make a token worthless; the API server believes in it for ten more seconds."""
        self.admin.delete("Secret", name, namespace=SYSTEM)

    def allow_agent(self, rules: Sequence[ApiObject] = AGENT_RULES) -> None:
        """What the agent may do from now on."""
        self.admin.patch("ClusterRole", AGENT, {"rules": list(rules)})

    def kubeconfig(
        self, path: Path, *, token: str = "", token_file: Path | None = None, server: str = ""
    ) -> Path:
        """Write a kubeconfig; returns its path."""
        user = {"tokenFile": str(token_file)} if token_file else {"token": token}
        cluster = {"server": server or self.server, "certificate-authority": str(self.ca)}
        text = json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "lab", "cluster": cluster}],
                "users": [{"name": "lab", "user": user}],
                "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab"}}],
                "current-context": "lab",
            },
            indent=1,
        )
        return write_at_once(path, text)

    # --- what happened --------------------------------------------------------------------------

    def ask_etcd(self, path: str, question: ApiObject) -> Any:
        """One question to etcd's own API."""

        def ask() -> Any:
            request = urllib.request.Request(
                f"http://127.0.0.1:{ETCD_PORT}{path}", data=json.dumps(question).encode()
            )
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            try:
                with opener.open(request, timeout=10) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                with error:
                    error.add_note(error.read().decode(errors="replace"))
                raise

        return self.node.inside(ask)

    def compact(self) -> int:
        """Make etcd forget all but the newest state; returns its revision."""
        revision = int(self.ask_etcd("/v3/maintenance/status", {})["header"]["revision"])
        self.ask_etcd("/v3/kv/compaction", {"revision": revision, "physical": True})
        return revision

    def requests(self) -> list[ApiObject]:
        """What the agents have asked for, as the API server's audit log has it."""
        lines = self._audit_log.read_text().splitlines() if self._audit_log.exists() else []
        return [json.loads(line) for line in lines]

    # --- how they are started -------------------------------------------------------------------

    @property
    def _audit_log(self) -> Path:
        return self.folder / "audit.log"

    def _etcd_arguments(self) -> list[str]:
        url = f"http://127.0.0.1:{ETCD_PORT}"
        return [
            f"--data-dir={self.folder}/etcd",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--log-level=warn",
            # Written to the kernel is safe from our kind of power cut.
            "--unsafe-no-fsync",
        ]

    def _apiserver_arguments(self) -> list[str]:
        folder = self.folder
        return [
            f"--etcd-servers=http://127.0.0.1:{ETCD_PORT}",
            f"--advertise-address={self.node.ipv4}",
            "--bind-address=::",
            f"--secure-port={PORT}",
            f"--tls-cert-file={folder}/server.crt",
            f"--tls-private-key-file={folder}/server.key",
            f"--service-cluster-ip-range={addresses.SERVICES_IPV4},{addresses.SERVICES_IPV6}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder}/server.crt",
            f"--service-account-signing-key-file={folder}/server.key",
            "--authorization-mode=RBAC",
            f"--token-auth-file={folder}/tokens.csv",
            # Pods without a service account: nothing makes these here.
            "--disable-admission-plugins=ServiceAccount",
            f"--audit-policy-file={folder}/audit-policy.json",
            f"--audit-log-path={self._audit_log}",
            f"--watch-cache={str(self.watch_cache).lower()}",
            "--profiling=false",
            # Told to go, it keeps no watch for the sake of whoever does not listen.
            "--shutdown-watch-termination-grace-period=1s",
        ]

    def _controllers_arguments(self) -> list[str]:
        return [
            f"--kubeconfig={self.folder}/controllers.kubeconfig",
            "--controllers=endpointslice-controller,endpointslice-mirroring-controller",
            "--leader-elect=false",
            "--secure-port=0",
            # As fast as it can: the limits are there for the sake of others.
            "--kube-api-qps=1000",
            "--kube-api-burst=1000",
        ]

    def _make_files(self) -> None:
        folder = self.folder
        names = [
            "DNS:kubernetes.default.svc",
            *(f"IP:{ip}" for ip in (self.node.ipv4, self.node.ipv6, "10.96.0.1", "fd96::1")),
        ]
        (folder / "certificates.cnf").write_text(_CERTIFICATES.format(names=",".join(names)))
        self._certificate("ca", "/CN=the lab's CA")
        self._certificate("server", "/CN=kube-apiserver", "-CA", "ca.crt", "-CAkey", "ca.key")
        (folder / "tokens.csv").write_text(f"{ADMIN_TOKEN},admin,admin,system:masters\n")
        (folder / "audit-policy.json").write_text(json.dumps(_AUDIT_POLICY))
        self.kubeconfig(folder / "controllers.kubeconfig", token=ADMIN_TOKEN)

    def _certificate(self, name: str, subject: str, *signer: str) -> None:
        """Make NAME.key and NAME.crt, with the extensions of the section of that name."""
        ran = subprocess.run(
            [
                *("openssl", "req", "-x509", "-config", "certificates.cnf", "-extensions", name),
                *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-days", "2"),
                *("-subj", subject, "-keyout", f"{name}.key", "-out", f"{name}.crt", *signer),
            ],
            cwd=self.folder,
            check=False,
            capture_output=True,
            text=True,
        )
        if ran.returncode:
            raise LabError(f"openssl made no certificate: {ran.stderr.strip()}")


def write_at_once(path: Path, text: str) -> Path:
    """Write a file so that nobody ever reads half of it; returns its path."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text)
    draft.rename(path)
    return path
