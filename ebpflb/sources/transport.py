# SPDX-License-Identifier: Apache-2.0
"""Where the API server is and who we are: the only user of the ``kubernetes`` library.

The library reads kubeconfigs and service accounts, runs exec plugins and knows proxies. It costs
16 to 60 MB, so a short-lived child process imports it (this module again, as the loader does with
bcc), and the agent keeps what the child found out. This file must not know what is asked of the
server, nor how.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import yaml

from ebpflb.sources.failures import ApiError

SERVICE_ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
LOAD_TIMEOUT_S: Final = 60


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """What the user said of the API server. Nothing: we run in a pod, with its service account.

    ``master`` alone goes with the service account too, where there is one; that is how an agent in
    a pod is given an address that is no Service's.
    """

    kubeconfig: str = ""
    master: str = ""
    service_account: str = SERVICE_ACCOUNT


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """How to speak to the API server. Certificates and the key are PEM texts, "" for none.

    ``authorization`` is the header's value; with ``token_file`` that file has a newer one. When one
    of ``files`` changes, all this must be found out anew.
    """

    server: str
    authorization: str = ""
    token_file: str = ""
    ca: str = ""
    certificate: str = ""
    key: str = ""
    verify: bool = True
    server_name: str = ""
    proxy: str = ""
    files: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Without the secrets."""
        return f"Access({self.server!r})"

    def header(self) -> str:
        """The Authorization header's value as of now, "" for none."""
        if self.token_file:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                token = Path(self.token_file).read_text(encoding="utf-8").strip()
                if token and token.isprintable():
                    return f"Bearer {token}"
        return self.authorization


def load_access(where: Where) -> Access:
    """Find out, in a child process. Raises ApiError, reason ``credentials``."""
    try:
        child = subprocess.run(
            [sys.executable, "-m", "ebpflb.sources.transport"],
            input=msgspec.json.encode(_Question(where, LOAD_TIMEOUT_S)),
            capture_output=True,
            start_new_session=True,  # so that it can end with all that it started
            check=False,
        )
    except OSError as error:
        raise ApiError("credentials", f"cannot start {sys.executable}: {error.strerror}") from None
    if child.returncode == -signal.SIGKILL:
        raise ApiError(
            "credentials",
            f"{_source(where)}: gave up after {LOAD_TIMEOUT_S} s (does an exec plugin hang?)",
        )
    try:
        answer = msgspec.json.decode(child.stdout, type=_Answer)
    except msgspec.MsgspecError:
        last = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ApiError(
            "credentials",
            f"{_source(where)}: {last or f'reading it ended with {child.returncode}'}",
        ) from None
    if answer.access is None:
        raise ApiError("credentials", f"{_source(where)}: {answer.problem}")
    return answer.access


def _source(where: Where) -> str:
    if where.kubeconfig:
        return f"kubeconfig {where.kubeconfig}"
    return f"service account {where.service_account}"


class Credentials:
    """The Access in force, found out again when a file changes or the server wants another.

    Any thread may ask. ``notice`` gets ``credentials_unreadable`` (reason, action) when it is to be
    found out anew and cannot be: what was known stays in force then; and
    ``api_server_not_verified`` (server, reason, action).
    """

    def __init__(
        self, load: Callable[[], Access], notice: Callable[..., None] = lambda *_, **__: None
    ) -> None:
        self._load = load
        self._notice = notice
        self._lock = threading.Lock()
        self._access: Access | None = None
        self._context: ssl.SSLContext | None = None
        self._generation = 0
        self._stale = False
        self._stamps: dict[str, tuple[int, ...]] = {}
        self._complaint = ""

    def current(self) -> tuple[int, Access, ssl.SSLContext | None]:
        """A number that changes with it, the Access, and what TLS needs. Raises ApiError."""
        with self._lock:
            if self._access is None or self._stale or _stamps(self._access.files) != self._stamps:
                self._find_out()
            assert self._access is not None  # noqa: S101 - for the type checker
            return self._generation, self._access, self._context

    def renew(self, generation: int) -> None:
        """Let it be found out anew, unless that was done since ``generation``."""
        with self._lock:
            self._stale = self._stale or generation == self._generation

    def _find_out(self) -> None:
        files = self._access.files if self._access else ()
        stamps = _stamps(files)
        try:
            access = self._load()
            context = _context(access) if _is_https(access.server) else None
        except ApiError as error:
            self._stale = False
            self._stamps = stamps
            if self._access is None:
                raise
            if error.text != self._complaint:
                self._complaint = error.text
                self._notice(
                    "credentials_unreadable",
                    reason=error.text,
                    action="mend it; until then the credentials that were read before are used",
                )
            return
        # A file that changed while it was read is read again the next time.
        self._stamps = stamps if access.files == files else _stamps(access.files)
        self._stale, self._complaint = False, ""
        if access != self._access:
            self._access, self._context = access, context
            self._generation += 1
            if not access.verify:
                self._notice(
                    "api_server_not_verified",
                    server=access.server,
                    reason="insecure-skip-tls-verify is set: whoever answers there is believed",
                    action="give its certificate-authority instead",
                )


def _stamps(files: Sequence[str]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            status = Path(file).stat()
        except OSError:
            found[file] = ()
        else:
            found[file] = (status.st_mtime_ns, status.st_size, status.st_ino)
    return found


def _is_https(server: str) -> bool:
    """Whether this URL is one of TLS. Raises ApiError where it is none of HTTP at all."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(server)
        if parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0:
            return parts.scheme == "https"
    raise ApiError("credentials", f"the server's address {server!r} is no http or https URL")


def _context(access: Access) -> ssl.SSLContext:
    """TLS as Go's: any certificate of the CA file is an anchor, old CAs are taken as they are."""
    try:
        context = ssl.create_default_context(cadata=access.ca or None)
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        if not access.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
    except (ssl.SSLError, ValueError) as error:
        raise ApiError("credentials", f"the CA certificate cannot be read: {error}") from None
    if access.certificate:
        pem = f"{access.certificate}\n{access.key}"
        # OpenSSL takes files only: one in memory, which nobody else sees.
        with os.fdopen(os.memfd_create("client-certificate"), "wb") as file:
            file.write(pem.encode())
            file.flush()
            try:
                context.load_cert_chain(f"/proc/self/fd/{file.fileno()}", password="")
            except (ssl.SSLError, OSError) as error:
                raise ApiError(
                    "credentials", f"the client certificate and key cannot be used: {error}"
                ) from None
    return context


# --- the child process ----------------------------------------------------------------------------


class _Question(msgspec.Struct, frozen=True):
    where: Where
    timeout_s: int


class _Answer(msgspec.Struct, frozen=True):
    access: Access | None = None
    problem: str = ""


class _UnusableError(Exception):
    """What is wrong with what the user gave."""


def main() -> int:
    """The child: a question on standard input, the answer on standard output."""
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=_Question)
    # A plugin that hangs is ended with us, nobody else is in the session.
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
    signal.alarm(question.timeout_s)
    try:
        answer = _Answer(access=_found_out(question.where))
    except Exception as error:  # noqa: BLE001 - whatever its parsers raise is the user's to mend
        answer = _Answer(problem=" ".join(_plainly(error).split()))
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    return 0


def _plainly(error: Exception) -> str:
    from kubernetes.config import ConfigException  # noqa: PLC0415 - as below

    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    known = isinstance(error, (ConfigException, yaml.YAMLError, _UnusableError))
    return str(error) if known else f"{type(error).__name__}: {error}"


def _found_out(where: Where) -> Access:
    # Here and not above: the agent must not pay for it.
    from kubernetes.client import Configuration  # noqa: PLC0415
    from kubernetes.client.rest import should_bypass_proxies  # noqa: PLC0415

    complaints = _Complaints()
    logging.getLogger().addHandler(complaints)
    configuration: Any = Configuration()
    if where.kubeconfig:
        token_files, files = _load_kubeconfig(where.kubeconfig, configuration)
    else:
        token_files, files = _load_service_account(where, configuration)
    if where.master:
        configuration.host = _url(where.master, tls=bool(configuration.ssl_ca_cert))
    server = configuration.host.rstrip("/")
    authorization = _authorization(configuration)
    if complaints.texts and not authorization and not configuration.cert_file:
        raise _UnusableError("; ".join(complaints.texts))
    proxy = configuration.proxy or ""
    if proxy and should_bypass_proxies(server, configuration.no_proxy or ""):
        proxy = ""
    if not where.kubeconfig and not server.startswith("https:"):
        authorization = ""  # a pod's token is not sent in clear text
    token = authorization.partition(" ")[2]
    return Access(
        server=server,
        authorization=authorization,
        token_file=next((f for f in token_files if token and _text(f).strip() == token), ""),
        ca=_text(configuration.ssl_ca_cert),
        certificate=_text(configuration.cert_file),
        key=_text(configuration.key_file),
        verify=bool(configuration.verify_ssl),
        server_name=configuration.tls_server_name or "",
        proxy=proxy,
        files=files,
    )


class _Complaints(logging.Handler):
    """What the library logs where others would raise: an exec plugin that failed."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


_Files = tuple[str, ...]


def _load_kubeconfig(paths: str, configuration: Any) -> tuple[_Files, _Files]:
    """Returns the token files that are named in it, and all files that it depends on."""
    from kubernetes.config import load_kube_config  # noqa: PLC0415

    token_files: list[str] = []
    files: list[str] = []
    for path in paths.split(os.pathsep):
        files.append(path)
        for key, name in _files_named(yaml.safe_load(_text(path))):
            named = str(Path(path).absolute().parent / name)
            (token_files if key == "tokenFile" else files).append(named)
    load_kube_config(paths, client_configuration=configuration, persist_config=False)
    return tuple(token_files), tuple(files)


_FILE_KEYS: Final = ("tokenFile", "certificate-authority", "client-certificate", "client-key")


def _files_named(content: object) -> Iterator[tuple[str, str]]:
    if not isinstance(content, dict):
        raise _UnusableError("it is no kubeconfig: no mapping")
    for section, part in (("clusters", "cluster"), ("users", "user")):
        for entry in content.get(section) or ():
            inner = entry.get(part) if isinstance(entry, dict) else None
            for key in _FILE_KEYS:
                name = inner.get(key) if isinstance(inner, dict) else None
                if isinstance(name, str) and name:
                    yield key, name


def _load_service_account(where: Where, configuration: Any) -> tuple[_Files, _Files]:
    """As a pod's; with ``--master`` and no service account, nobody's."""
    from kubernetes.config.incluster_config import InClusterConfigLoader  # noqa: PLC0415

    token = f"{where.service_account}/token"
    ca = f"{where.service_account}/ca.crt"
    environ: dict[str, str] = dict(os.environ)
    if where.master:
        if not Path(token).exists():
            return (), ()
        # The library wants to see the address that we replace.
        environ |= {"KUBERNETES_SERVICE_HOST": "kubernetes", "KUBERNETES_SERVICE_PORT": "443"}
    elif not environ.get("KUBERNETES_SERVICE_HOST"):
        raise _UnusableError(
            "not in a pod (KUBERNETES_SERVICE_HOST is not set): give --kubeconfig or --master"
        )
    InClusterConfigLoader(token_filename=token, cert_filename=ca, environ=environ).load_and_set(
        configuration
    )
    return (token,), (ca,)


def _authorization(configuration: Any) -> str:
    for setting in configuration.auth_settings().values():
        if setting.get("key") == "authorization" and setting.get("value"):
            scheme, _, secret = " ".join(setting["value"].split()).partition(" ")
            return f"{scheme.capitalize()} {secret}"
    return ""


def _url(text: str, *, tls: bool) -> str:
    return text if "://" in text else f"{'https' if tls else 'http'}://{text}"


def _text(path: str | None) -> str:
    return Path(path).read_text(encoding="utf-8") if path else ""


if __name__ == "__main__":
    sys.exit(main())
