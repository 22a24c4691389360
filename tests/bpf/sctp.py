"""SCTP packets, and their CRC by the book (RFC 9260, appendix A): one byte after the other."""

from __future__ import annotations

from scapy.layers.sctp import (
    SCTP,
    SCTPChunkAbort,
    SCTPChunkCookieAck,
    SCTPChunkCookieEcho,
    SCTPChunkData,
    SCTPChunkInit,
    SCTPChunkInitAck,
    SCTPChunkShutdown,
    SCTPChunkShutdownAck,
    SCTPChunkShutdownComplete,
)
from scapy.packet import Packet

from tests.bpf.packets import End, frame
from tests.bpf.talks import Talk

POLYNOMIAL = 0x82F63B78
CRC = slice(8, 12)
"""Where in the packet it is."""

CHUNKS = {
    "INIT": SCTPChunkInit(init_tag=1, a_rwnd=65536, n_out_streams=1, n_in_streams=1, init_tsn=1),
    "INIT ACK": SCTPChunkInitAck(
        init_tag=2, a_rwnd=65536, n_out_streams=1, n_in_streams=1, init_tsn=2
    ),
    "COOKIE ECHO": SCTPChunkCookieEcho(cookie=b"cookie.."),
    "COOKIE ACK": SCTPChunkCookieAck(),
    "DATA": SCTPChunkData(beginning=1, ending=1, tsn=1, data=b"data"),
    "ABORT": SCTPChunkAbort(),
    "SHUTDOWN": SCTPChunkShutdown(cumul_tsn_ack=1),
    "SHUTDOWN ACK": SCTPChunkShutdownAck(),
    "SHUTDOWN COMPLETE": SCTPChunkShutdownComplete(),
}


def _shifted(register: int) -> int:
    for _ in range(8):
        register = register >> 1 ^ (POLYNOMIAL if register & 1 else 0)
    return register


_TABLE = tuple(map(_shifted, range(256)))


def crc_register(data: bytes) -> int:
    register = 0xFFFFFFFF
    for byte in data:
        register = register >> 8 ^ _TABLE[(register ^ byte) & 0xFF]
    return register


def crc32c(packet: bytes) -> bytes:
    """The CRC of an SCTP packet, as it is sent; what the packet has in its place does not count."""
    return (crc_register(packet[:8] + bytes(4) + packet[12:]) ^ 0xFFFFFFFF).to_bytes(4, "little")


def ending_for(packet: bytes, crc: int) -> bytes:
    """Four bytes with which behind it the packet has this CRC (the number, not as it is sent)."""
    register = crc ^ 0xFFFFFFFF
    for _ in range(32):
        register = (register ^ POLYNOMIAL) << 1 | 1 if register >> 31 else register << 1  # back
    return (register ^ crc_register(packet[:8] + bytes(4) + packet[12:])).to_bytes(4, "little")


def make_sctp(source: End, target: End, what: str, *, tag: int = 1) -> Packet:
    """A packet of one chunk; ``tag`` is that of who begins, in an INIT its own initiate tag."""
    chunk = CHUNKS[what].copy()
    if what == "INIT":
        chunk.init_tag = tag
    header = SCTP(sport=source.port, dport=target.port, tag=0 if what == "INIT" else tag)
    return frame(source.address, target.address, header, chunk)


def associates(talk: Talk) -> End:
    """The four packets with which an association begins. Returns the backend."""
    for what, answer in (("INIT", "INIT ACK"), ("COOKIE ECHO", "COOKIE ACK")):
        assert talk.says(what).target != talk.frontend
        assert talk.is_home(talk.answers(answer))
    return talk.backend
