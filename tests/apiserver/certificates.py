"""Certificates for tests, made by openssl: an authority, and what it signs."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Pair(NamedTuple):
    """Files: a certificate and its key."""

    certificate: Path
    key: Path

    @property
    def pem(self) -> str:
        return self.certificate.read_text()

    @property
    def key_pem(self) -> str:
        return self.key.read_text()


class Authority:
    """Signs what it is asked to; ``ca`` is what others must trust."""

    def __init__(self, folder: Path, name: str = "test-ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.ca = Pair(folder / "ca.crt", folder / "ca.key")
        _openssl(
            *("req", "-x509", *_CURVE, "-days", "30", "-subj", f"/CN={name}"),
            *("-keyout", str(self.ca.key), "-out", str(self.ca.certificate)),
        )

    def sign(self, name: str, *, names: str = "IP:127.0.0.1", days: int = 30) -> Pair:
        """Return a certificate for ``names``; negative ``days``: one that has expired."""
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        request = self._folder / f"{name}.csr"
        _openssl(
            *("req", *_CURVE, "-subj", f"/CN={name}"),
            *("-keyout", str(pair.key), "-out", str(request)),
        )
        extensions = self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={names}\n")
        _openssl(
            *("x509", "-req", "-in", str(request), "-days", str(days), "-set_serial", "7"),
            *("-CA", str(self.ca.certificate), "-CAkey", str(self.ca.key)),
            *("-extfile", str(extensions), "-out", str(pair.certificate)),
        )
        return pair


def server_context(pair: Pair, *, clients: Path | None = None) -> ssl.SSLContext:
    """Serve as ``pair``; ``clients``: the authority of those that may come."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    if clients is not None:
        context.load_verify_locations(clients)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
