"""What is found out of kubeconfigs, service accounts and plugins; what is said of bad ones."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ebpflb.sources import transport
from ebpflb.sources.failures import ApiError
from ebpflb.sources.transport import Access, Where, load_access
from tests.apiserver.certificates import Authority

SERVER = "https://10.0.0.1:6443"
JsonText = dict[str, Any]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name.startswith("KUBERNETES_SERVICE"):
            monkeypatch.delenv(name)


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


Kubeconfig = Callable[..., Path]


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Kubeconfig:
    """Write one; ``cluster`` and ``user`` are what stands in it beside the server."""

    def write(user: JsonText | None = None, **cluster: object) -> Path:
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": SERVER} | cluster}],
            "users": [{"name": "u", "user": user or {}}],
        }
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


def found(where: Where) -> Access:
    """In this process, which has paid for the library anyway."""
    return transport._found_out(where)


def of(path: Path, **options: str) -> Access:
    return found(Where(kubeconfig=str(path), **options))


def problem(where: Where) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the child catches them all
        found(where)
    return transport._plainly(caught.value)


# --- kubeconfig -----------------------------------------------------------------------------------


def test_a_token(kubeconfig: Kubeconfig) -> None:
    path = kubeconfig({"token": "secret"})
    access = of(path)
    assert access.server == SERVER
    assert access.authorization == "Bearer secret"
    assert access.files == (str(path),)


def test_a_token_file_beside_it(kubeconfig: Kubeconfig, tmp_path: Path) -> None:
    """As kube-proxy's own kubeconfig in a DaemonSet; the library would never read it again."""
    (tmp_path / "token").write_text("first\n")
    access = of(kubeconfig({"tokenFile": "token"}))
    assert access.token_file == str(tmp_path / "token")
    assert access.header() == "Bearer first"
    (tmp_path / "token").write_text("second\n")
    assert access.header() == "Bearer second"


def test_a_password(kubeconfig: Kubeconfig) -> None:
    access = of(kubeconfig({"username": "me", "password": "secret"}))
    assert access.authorization == f"Basic {encoded('me:secret')}"


def test_certificates_as_files(
    kubeconfig: Kubeconfig, authority: Authority, tmp_path: Path
) -> None:
    pair = authority.sign("client")
    for name, source in (("ca", authority.ca.certificate), ("crt", pair[0]), ("key", pair[1])):
        (tmp_path / name).write_bytes(source.read_bytes())
    user = {"client-certificate": "crt", "client-key": str(tmp_path / "key")}
    path = kubeconfig(user, **{"certificate-authority": "ca"})
    access = of(path)
    assert (access.ca, access.certificate, access.key) == (
        authority.ca.pem,
        pair.pem,
        pair.key_pem,
    )
    files = {str(path), *(str(tmp_path / name) for name in ("ca", "crt", "key"))}
    assert set(access.files) == files


def test_certificates_as_data(kubeconfig: Kubeconfig, authority: Authority) -> None:
    pair = authority.sign("client")
    user = {
        "client-certificate-data": encoded(pair.pem),
        "client-key-data": encoded(pair.key_pem),
    }
    access = of(kubeconfig(user, **{"certificate-authority-data": encoded(authority.ca.pem)}))
    assert (access.ca, access.certificate, access.key) == (
        authority.ca.pem,
        pair.pem,
        pair.key_pem,
    )


def test_how_the_server_is_reached(kubeconfig: Kubeconfig) -> None:
    access = of(
        kubeconfig(
            **{
                "insecure-skip-tls-verify": True,
                "tls-server-name": "api.example",
                "proxy-url": "http://proxy.example:3128",
            }
        )
    )
    assert access.verify is False
    assert access.server_name == "api.example"
    assert access.proxy == "http://proxy.example:3128"


@pytest.mark.parametrize(("no_proxy", "used"), [("", True), ("10.0.0.0/8", False), ("*", False)])
def test_a_proxy_from_the_environment(
    no_proxy: str, used: bool, kubeconfig: Kubeconfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert bool(of(kubeconfig({"token": "t"})).proxy) is used


@pytest.mark.parametrize(
    ("master", "expected"),
    [
        ("https://10.9.9.9:443", "https://10.9.9.9:443"),
        ("https://10.9.9.9:443/", "https://10.9.9.9:443"),
        ("10.9.9.9:8080", "http://10.9.9.9:8080"),
    ],
)
def test_master_replaces_the_address(master: str, expected: str, kubeconfig: Kubeconfig) -> None:
    access = of(kubeconfig({"token": "t"}), master=master)
    assert access.server == expected
    assert access.authorization == "Bearer t"


def test_master_without_a_scheme_is_tls_where_there_is_a_ca(
    kubeconfig: Kubeconfig, authority: Authority
) -> None:
    path = kubeconfig(**{"certificate-authority-data": encoded(authority.ca.pem)})
    assert of(path, master="10.9.9.9:443").server == "https://10.9.9.9:443"


# --- exec plugins ---------------------------------------------------------------------------------


def plugin(tmp_path: Path, text: str) -> JsonText:
    script = tmp_path / "plugin.py"
    script.write_text(text)
    return {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": [str(script)],
            "interactiveMode": "Never",
        }
    }


def credential(**status: str) -> str:
    answer = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": status,
    }
    return f"print({json.dumps(answer)!r})"


def test_a_plugin_gives_a_token(kubeconfig: Kubeconfig, tmp_path: Path) -> None:
    access = of(kubeconfig(plugin(tmp_path, credential(token="from-plugin"))))
    assert access.authorization == "Bearer from-plugin"
    assert not access.token_file


def test_a_plugin_gives_a_certificate(
    kubeconfig: Kubeconfig, authority: Authority, tmp_path: Path
) -> None:
    pair = authority.sign("client")
    text = credential(clientCertificateData=pair.pem, clientKeyData=pair.key_pem)
    access = of(kubeconfig(plugin(tmp_path, text)))
    assert (access.certificate, access.key) == (pair.pem, pair.key_pem)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import sys; sys.exit('log in first')", "log in first"),
        ("print('no JSON')", "failed to decode"),
        ("print('{}')", "missing key"),
        (credential(), "missing token"),
    ],
)
def test_a_plugin_that_fails_says_why(
    text: str, says: str, kubeconfig: Kubeconfig, tmp_path: Path
) -> None:
    assert says in problem(Where(kubeconfig=str(kubeconfig(plugin(tmp_path, text)))))


def test_a_plugin_that_does_not_exist(kubeconfig: Kubeconfig, tmp_path: Path) -> None:
    user = plugin(tmp_path, "")
    user["exec"]["command"] = "no-such-plugin"
    assert "no-such-plugin" in problem(Where(kubeconfig=str(kubeconfig(user))))


# --- bad kubeconfigs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param("", "no kubeconfig", id="empty"),
        pytest.param("- a\n- b\n", "no kubeconfig", id="a list"),
        pytest.param("a: [", "while parsing", id="no YAML"),
        pytest.param("kind: Config\n", "current-context", id="nothing in it"),
        pytest.param(
            "current-context: x\ncontexts: []\nclusters: []\nusers: []\n",
            "name x",
            id="a context that is not there",
        ),
        pytest.param("clusters: 7\n", "", id="clusters are a number"),
    ],
)
def test_a_kubeconfig_that_makes_no_sense(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(content)
    assert says in problem(Where(kubeconfig=str(path)))


def test_a_kubeconfig_that_is_not_there(tmp_path: Path) -> None:
    assert problem(Where(kubeconfig=str(tmp_path / "x"))) == (
        f"{tmp_path}/x: No such file or directory"
    )


def test_a_kubeconfig_that_names_a_file_that_is_not_there(kubeconfig: Kubeconfig) -> None:
    path = kubeconfig(**{"certificate-authority": "nowhere.crt"})
    assert "nowhere.crt" in problem(Where(kubeconfig=str(path)))


# --- service account ------------------------------------------------------------------------------


@pytest.fixture
def account(tmp_path: Path, authority: Authority) -> Path:
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    (folder / "token").write_text("pods-token\n")
    (folder / "ca.crt").write_text(authority.ca.pem)
    return folder


@pytest.mark.parametrize(
    ("host", "server"),
    [("10.96.0.1", "https://10.96.0.1:443"), ("fd96::1", "https://[fd96::1]:443")],
)
def test_in_a_pod(
    host: str,
    server: str,
    account: Path,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    access = found(Where(service_account=str(account)))
    assert access.server == server
    assert access.authorization == "Bearer pods-token"
    assert access.token_file == str(account / "token")
    assert access.ca == authority.ca.pem
    assert access.files == (str(account / "ca.crt"),)


def test_nowhere(account: Path) -> None:
    said = problem(Where(service_account=str(account)))
    assert "--kubeconfig" in said
    assert "--master" in said


def test_in_a_pod_with_another_address(account: Path) -> None:
    """How an agent in a pod reaches the API server without any Service."""
    access = found(Where(service_account=str(account), master="https://172.18.0.2:6443"))
    assert access.server == "https://172.18.0.2:6443"
    assert access.authorization == "Bearer pods-token"


def test_a_token_is_not_sent_in_clear_text(account: Path) -> None:
    access = found(Where(service_account=str(account), master="http://172.18.0.2:8080"))
    assert not access.header()


def test_master_alone_is_nobody(tmp_path: Path) -> None:
    access = found(Where(service_account=str(tmp_path), master="http://127.0.0.1:8080"))
    assert (access.server, access.header()) == ("http://127.0.0.1:8080", "")


def test_a_service_account_without_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert "token" in problem(Where(service_account=str(tmp_path)))


# --- the child process ----------------------------------------------------------------------------


def test_the_child_tells_what_it_found(kubeconfig: Kubeconfig, tmp_path: Path) -> None:
    path = kubeconfig(plugin(tmp_path, credential(token="from-plugin")))
    access = load_access(Where(kubeconfig=str(path)))
    assert access == of(path)


def test_the_library_is_not_loaded_by_who_watches() -> None:
    """It costs 16 to 60 MB."""
    text = "import sys, ebpflb.sources.cluster; print('kubernetes' in sys.modules)"
    asked = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == "False"


def test_the_child_tells_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ApiError) as caught:
        load_access(Where(kubeconfig=str(tmp_path / "x")))
    assert caught.value.reason == "credentials"
    assert str(tmp_path / "x") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plugin_that_hangs_is_given_up(
    kubeconfig: Kubeconfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ended: the test holds the other end of a pipe that it inherits."""
    monkeypatch.setattr(transport, "LOAD_TIMEOUT_S", 1)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    path = kubeconfig(
        plugin(tmp_path, f"import time; f = open({str(fifo)!r}, 'w'); time.sleep(99)")
    )
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(ApiError, match="gave up after 1 s"):
            load_access(Where(kubeconfig=str(path)))
        os.set_blocking(reading, True)
        assert os.read(reading, 1) == b""  # nobody has the other end any more
    finally:
        os.close(reading)


def test_a_child_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ApiError, match="ended with 1"):
        load_access(Where(kubeconfig="x"))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ApiError, match="No such file"):
        load_access(Where(kubeconfig="x"))
