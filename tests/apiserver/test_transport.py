"""From a socket to an answer: TLS, tokens that change, proxies, servers that take turns."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ebpflb.sources.client import Client
from ebpflb.sources.cluster import ApiSource
from ebpflb.sources.failures import ApiError
from ebpflb.sources.transport import Access, Credentials
from tests.apiserver.certificates import Authority, Pair, server_context
from tests.apiserver.conftest import KUBERNETES, KUBERNETES_SLICE, THIS_NODE, Watching
from tests.apiserver.consumer import QUICK, Consumer
from tests.apiserver.fake import Answer, FakeApiServer, Stream
from tests.builders import NODE, service_object

PATH = "/api/v1/services"


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "somebody-else")


@contextlib.contextmanager
def serving(pair: Pair, *, clients: Path | None = None) -> Iterator[FakeApiServer]:
    with FakeApiServer(server_context(pair, clients=clients)) as server:
        server.put(KUBERNETES, KUBERNETES_SLICE, THIS_NODE)
        yield server


def ask(access: Access, **options: Any) -> bytes:
    """Make one request and return what is answered."""
    client = Client(Credentials(lambda: access), connect_timeout_s=0.2, **options)
    with contextlib.closing(client), client.get(PATH, {}, read_timeout_s=5, compressed=False) as s:
        body = b""
        while data := s.read():
            body += data
        return body


def failure(access: Access) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask(access)
    return caught.value


# --- TLS ------------------------------------------------------------------------------------------


def test_a_trusted_server_is_asked(authority: Authority) -> None:
    with serving(authority.sign("server")) as server:
        assert b"kubernetes" in ask(Access(server=server.url, ca=authority.ca.pem))


@pytest.mark.parametrize(
    ("signed", "trusted", "says"),
    [
        pytest.param({"days": -1}, True, "certificate has expired", id="expired"),
        pytest.param({}, False, "certificate is not trusted", id="a wrong CA"),
        pytest.param({"names": "IP:10.9.9.9"}, True, "is another server's", id="a wrong name"),
    ],
)
def test_a_server_that_is_not_trusted_is_named_once_and_asked_again(  # noqa: PLR0917
    signed: dict[str, Any],
    trusted: bool,
    says: str,
    authority: Authority,
    stranger: Authority,
    watching: Watching,
    consumer: Consumer,
) -> None:
    pair = authority.sign("bad", **signed)
    ca = authority.ca.pem if trusted else stranger.ca.pem
    with serving(pair) as server:
        watching(Access(server=server.url, ca=ca))
        consumer.wait(lambda: consumer.failures.total() > 6)
        [lost] = consumer.said("api_lost")
        assert says in lost["reason"]
        assert lost["resource"] is None
        assert "ca.crt" in lost["action"]
        assert {reason for _, _, reason in consumer.failures} == {"tls"}


def test_a_certificate_that_is_renewed_ends_the_outage(
    authority: Authority, watching: Watching, consumer: Consumer
) -> None:
    with serving(authority.sign("old", days=-1)) as server:
        watching(Access(server=server.url, ca=authority.ca.pem))
        consumer.wait(lambda: consumer.said("api_lost"))
        server.down()
        server._tls = server_context(authority.sign("new"))
        server.up()
        consumer.wait_synced()
        consumer.wait(lambda: consumer.said("api_back"))


def test_insecure_skip_tls_verify_takes_any_server(stranger: Authority) -> None:
    with serving(stranger.sign("any", names="DNS:elsewhere")) as server:
        assert ask(Access(server=server.url, verify=False))


def test_a_server_name_replaces_the_address(authority: Authority) -> None:
    with serving(authority.sign("named", names="DNS:api.example")) as server:
        access = Access(server=server.url, ca=authority.ca.pem, server_name="api.example")
        assert ask(access)


def test_a_client_certificate_is_shown(authority: Authority, stranger: Authority) -> None:
    client = authority.sign("client")
    with serving(authority.sign("server"), clients=authority.ca.certificate) as server:
        access = Access(server=server.url, ca=authority.ca.pem)
        good = msgspec.structs.replace(access, certificate=client.pem, key=client.key_pem)
        assert ask(good)
        other = stranger.sign("client")
        bad = msgspec.structs.replace(access, certificate=other.pem, key=other.key_pem)
        assert failure(bad).reason in {"tls", "unreachable"}  # the reset may overtake the alert


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ca": "no certificate"}, "CA certificate"),
        ({"certificate": "none", "key": "none"}, "client certificate and key"),
    ],
)
def test_certificates_that_are_none_are_named(
    change: dict[str, str], says: str, authority: Authority
) -> None:
    access = Access(server="https://127.0.0.1:1", ca=authority.ca.pem)
    error = failure(msgspec.structs.replace(access, **change))
    assert error.reason == "credentials"
    assert says in error.text


def test_a_client_certificate_is_read_again_when_its_file_changes(
    authority: Authority, consumer: Consumer, watching: Watching, tmp_path: Path
) -> None:
    """The old one has expired by the time that the next connection is made."""
    old, new = authority.sign("client", days=-1), authority.sign("client-renewed")
    file = tmp_path / "client.crt"
    file.write_text(old.pem)

    def load() -> Access:
        key = new.key_pem if file.read_text() == new.pem else old.key_pem
        return Access(
            server=server.url,
            ca=authority.ca.pem,
            certificate=file.read_text(),
            key=key,
            files=(str(file),),
        )

    with serving(authority.sign("server"), clients=authority.ca.certificate) as server:
        watching(credentials=Credentials(load))
        consumer.wait(lambda: consumer.said("api_lost"))
        file.write_text(new.pem)
        consumer.wait_synced()


def test_http_to_a_tls_port_and_the_other_way_round(
    authority: Authority, server: FakeApiServer
) -> None:
    with serving(authority.sign("server")) as tls:
        assert failure(Access(server=tls.url.replace("https:", "http:"))).reason in {
            "unreachable",
            "refused",
        }
    error = failure(Access(server=server.url.replace("http:", "https:"), ca=authority.ca.pem))
    assert error.reason in {"tls", "unreachable"}


# --- tokens ---------------------------------------------------------------------------------------


def test_a_token_file_is_read_at_each_request(
    server: FakeApiServer, watching: Watching, consumer: Consumer, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    server.tokens = {"Bearer first", "Bearer second"}
    watching(Access(server=server.url, authorization="Bearer zero", token_file=str(file)))
    consumer.wait_synced()
    server.wait(lambda: server.watchers("services") == 1)
    file.write_text("second")
    server.cut()
    server.wait(lambda: server.count("watch", "services") >= 2)
    used = [r.headers["Authorization"] for r in server.requests if r.resource == "services"]
    assert (used[0], used[-1]) == ("Bearer first", "Bearer second")


@pytest.mark.parametrize("content", [b"", b"\n", b"a\r\nX-Header: b", b"\xff\xfe", None])
def test_a_token_file_that_makes_no_sense_leaves_the_old_token(
    content: bytes | None, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    access = Access(server="x", authorization="Bearer old", token_file=str(file))
    assert access.header() == "Bearer old"


def test_a_401_has_the_credentials_found_out_anew_and_tries_again_at_once(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    """As an exec plugin's: it is run again, once for three watches."""
    tokens = iter(("Bearer one", "Bearer two", "Bearer three"))
    server.tokens = {"Bearer one"}
    watching(credentials=Credentials(lambda: Access(server=server.url, authorization=next(tokens))))
    consumer.wait_synced()
    server.wait(lambda: server.watchers("services") == server.watchers("nodes") == 1)
    server.tokens = {"Bearer two"}
    server.cut()
    server.put(service_object())
    consumer.wait_equal(server)
    assert not consumer.notices
    assert next(tokens) == "Bearer three"


def test_a_401_until_the_token_changes(
    server: FakeApiServer, watching: Watching, consumer: Consumer, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    server.tokens = {"Bearer new"}
    watching(Access(server=server.url, authorization="Bearer old", token_file=str(file)))
    consumer.wait(lambda: consumer.failed("Service", "list", "unauthorized") >= 2)
    file.write_text("new")
    consumer.wait_synced()
    assert len(consumer.said("api_lost")) == 1


def test_credentials_that_can_no_longer_be_read_stay_in_force(
    server: FakeApiServer, watching: Watching, consumer: Consumer, tmp_path: Path
) -> None:
    file = tmp_path / "config"
    file.write_text("good")

    def load() -> Access:
        if file.read_text() != "good":
            raise ApiError("credentials", f"kubeconfig {file}: no mapping")
        return Access(server=server.url, files=(str(file),))

    watching(credentials=Credentials(load, consumer.notice))
    consumer.wait_synced()
    file.write_text("half wri")
    server.cut()
    server.put(service_object())
    consumer.wait_equal(server)
    server.cut()
    server.put(service_object("second"))
    consumer.wait_equal(server)
    [said] = consumer.said("credentials_unreadable")
    assert str(file) in said["reason"]


def test_credentials_that_cannot_be_read_at_first_are_tried_again(
    server: FakeApiServer, watching: Watching, consumer: Consumer, tmp_path: Path
) -> None:
    file = tmp_path / "config"

    def load() -> Access:
        if not file.exists():
            raise ApiError("credentials", f"kubeconfig {file}: No such file or directory")
        return Access(server=server.url)

    watching(credentials=Credentials(load, consumer.notice))
    consumer.wait(lambda: consumer.failures.total() > 6)
    [lost] = consumer.said("api_lost")
    assert "No such file" in lost["reason"]
    file.touch()
    consumer.wait_synced()


def test_secrets_are_not_shown() -> None:
    access = Access(server="https://x", authorization="Bearer secret", key="secret")
    assert "secret" not in repr(access)
    assert "secret" not in str((access,))


def test_a_redirect_is_not_followed(server: FakeApiServer) -> None:
    server.spoil(Answer(302, headers=(("Location", f"{server.url}{PATH}"),)))
    error = failure(Access(server=server.url, authorization="Bearer secret"))
    assert error.reason == "refused"
    assert len(server.requests) == 1


# --- no connection --------------------------------------------------------------------------------


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    error = failure(Access(server=f"http://127.0.0.1:{port}"))
    assert (error.reason, error.shared) == ("unreachable", True)
    assert "Connection refused" in error.text


def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        with socket.create_connection(address):  # fills the queue
            error = failure(Access(server=f"http://127.0.0.1:{address[1]}"))
    assert error.reason == "unreachable"
    assert "does not answer a connect" in error.text


def test_a_name_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    error = failure(Access(server="https://api.example:6443", verify=False))
    assert error.reason == "unreachable"
    assert "name cannot be resolved" in error.text


@pytest.mark.parametrize("server", ["ftp://127.0.0.1", "http://[::1", "nonsense", "http://:99999"])
def test_an_address_that_is_none(server: str) -> None:
    error = failure(Access(server=server))
    assert error.reason == "credentials"
    assert repr(server) in error.text


def test_a_proxy_is_asked_for_the_server(server: FakeApiServer) -> None:
    """The fake answers to any host, as a proxy does."""
    assert ask(Access(server="http://api.example:6443", proxy=server.url))
    assert server.requests[0].headers["Host"] == "api.example:6443"


def test_a_proxy_that_is_no_url_is_no_fault_of_ours() -> None:
    error = failure(Access(server="https://api.example", proxy="gopher://127.0.0.1:1"))
    assert error.reason == "unreachable"
    assert "no URL that can be used" in error.text


def test_a_proxy_that_is_down_is_named() -> None:
    error = failure(Access(server="https://api.example", proxy="http://127.0.0.1:1"))
    assert "proxy" in error.text


# --- several servers ------------------------------------------------------------------------------


def test_servers_take_turns_when_one_dies(
    server: FakeApiServer, consumer: Consumer, authority: Authority
) -> None:
    """B-87: the other is asked, and what it says of the first one's endpoint is believed."""
    pair = authority.sign("both", names="IP:127.0.0.1")
    with serving(pair) as first, serving(pair) as second:
        second.put(service_object("only-here"))
        second.version = first.version  # as one cluster's
        source = ApiSource(
            Credentials(lambda: Access(server=first.url, ca=authority.ca.pem)),
            consumer.emit,
            consumer.notice,
            node_name=NODE,
            metrics=consumer,
            timing=QUICK,
            addresses=Elsewhere(second.url),  # type: ignore[arg-type]
        )
        source.start()
        try:
            consumer.wait_synced()
            first.down()
            consumer.wait(lambda: second.watchers("services") == 1)
            second.put(service_object())
            consumer.wait(lambda: "web" in consumer.names("Service"))
        finally:
            source.stop()


class Elsewhere:
    """Addresses that are given."""

    def __init__(self, *urls: str) -> None:
        self._urls = urls

    def others(self, _server: str) -> tuple[str, ...]:
        return self._urls

    def learn(self, _event: object, _server: str) -> None: ...


def test_another_server_must_be_the_one_that_we_were_told_of(authority: Authority) -> None:
    """Its certificate must name what was configured, not where it was found."""
    configured = Access(server="https://127.0.0.2:1", ca=authority.ca.pem)
    for names, expected in (("IP:127.0.0.2", None), ("IP:127.0.0.1", "another server's")):
        with serving(authority.sign("other", names=names)) as server:
            client = Client(
                Credentials(lambda: configured),
                others=lambda _, url=server.url: [url],  # type: ignore[misc]
                connect_timeout_s=0.2,
            )
            texts: list[str] = []
            with contextlib.closing(client):
                for _ in range(2):
                    try:
                        with client.get(PATH, {}, read_timeout_s=5, compressed=False) as stream:
                            assert stream.read()
                    except ApiError as error:
                        texts.append(error.text)
            assert "refused" in texts[0]
            assert texts[1:] == [] if expected is None else expected in texts[1]


def test_no_other_server_without_tls(server: FakeApiServer) -> None:
    """There nobody could prove who they are."""
    client = Client(
        Credentials(lambda: Access(server="http://127.0.0.1:1")), others=lambda _: [server.url]
    )
    with contextlib.closing(client):
        for _ in range(3):
            with pytest.raises(ApiError), client.get(PATH, {}, read_timeout_s=5, compressed=False):
                pass
    assert not server.requests


def test_a_stream_that_dies_moves_on_to_the_next_server(
    authority: Authority, consumer: Consumer
) -> None:
    pair = authority.sign("both", names="IP:127.0.0.1")
    with serving(pair) as first, serving(pair) as second:
        first.spoil(Stream(end="silence"), times=-1)
        timing = msgspec.structs.replace(QUICK, watch_s=(0.1, 0.1), grace_s=0.1)
        source = ApiSource(
            Credentials(lambda: Access(server=first.url, ca=authority.ca.pem)),
            consumer.emit,
            consumer.notice,
            node_name=NODE,
            metrics=consumer,
            timing=timing,
            addresses=Elsewhere(second.url),  # type: ignore[arg-type]
        )
        source.start()
        try:
            second.wait(lambda: second.count("watch", "services") >= 1)
        finally:
            source.stop()
