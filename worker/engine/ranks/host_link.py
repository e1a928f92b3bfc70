"""The connections between the hosts of an engine, and the messages that start ranks on another host than the core's.

host                                              core
Challenge, proofs   ◀──▶                          of the common key, at the start of every connection
HostOffer           ──▶
                    ◀──  StartRanks | HostRefused
RankOffer           ──▶                           on another connection per rank, which then is the rank's channel
RanksStarted        ──▶
HostEnded           ──▶                           all its ranks have ended
(end of the stream: the host kills its ranks, and offers them again)

Connections are authenticated, not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from ....shared.values.distribution import full_version
from ...config.engine_config import EngineConfig
from ...config.ranks import KEY_VARIABLE
from ...models.weights.stored_files import weights_version

# Increased with any change of the handshake or of the messages below.
_GREETING = b"penstock ranks 1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_REJECTED = bytes(_PROOF_BYTES)
# Long, because a busy host may be late. Meanwhile no other host can join.
HANDSHAKE_TIMEOUT_S = 20.0
# A host that does not acknowledge for this long counts as lost, at both ends. Its kernel does, however busy it is.
HOST_TIMEOUT_S = 5
# The packages that compute: other versions may compute other numbers, or send other messages.
_PACKAGES = ("torch", "transformers")


class HostOffer(msgspec.Struct, array_like=True, tag="host"):
    """A host offers to run its ranks.

    Args:
        node_rank: number of the host.
        name: its name, for people.
        versions: of the packages that must be equal on all hosts.
        config_json: its ``EngineConfig``.
        folder: its folder of the model.
        weights: version of the weights in ``folder``.
        clock_ns: its ``time.monotonic_ns``.
    """

    node_rank: int
    name: str
    versions: dict[str, str]
    config_json: bytes
    folder: str
    weights: str
    clock_ns: int


class RankOffer(msgspec.Struct, array_like=True, tag="rank"):
    """The connection becomes the channel of ``rank``; ``token`` is that of ``StartRanks``."""

    rank: int
    token: str


class RanksStarted(msgspec.Struct, array_like=True, tag="started"):
    """The ranks have started; ``pids`` are in their order."""

    pids: list[int]


class HostEnded(msgspec.Struct, array_like=True, tag="ended"):
    """All ranks of the host have ended.

    Args:
        exits: ``Popen.returncode`` of each rank that ended by itself; the host has killed the others.
        num_oom_kills: number of processes that the kernel killed for lack of memory meanwhile.
        was_stopped: whether the host was stopped by an operator.
    """

    exits: dict[int, int] = {}
    num_oom_kills: int = 0
    was_stopped: bool = False


class StartRanks(msgspec.Struct, array_like=True, tag="start"):
    """Start these ranks."""

    ranks: list[int]
    token: str


class HostRefused(msgspec.Struct, array_like=True, tag="refused"):
    """The host cannot take part; ``is_final`` if not before its options or files are changed."""

    reason: str
    is_final: bool


FromHost = HostOffer | RankOffer | RanksStarted | HostEnded
ToHost = StartRanks | HostRefused


class HandshakeError(Exception):
    """The other end is no host of this engine, or does not know the key."""


def versions_here() -> dict[str, str]:
    """Return the versions that must be equal on all hosts."""
    versions = {"penstock": full_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "missing"
    return versions


def version_of_weights(config: EngineConfig, folder: Path) -> str:
    """Return the version of the weights in ``folder``; "" for random ones."""
    return weights_version(folder) if config.needs_weights else ""


def accept_host(sock: socket.socket, key: bytes) -> None:
    """Authenticate the host at the other end of a connection that it has opened.

    Raises:
        HandshakeError, OSError: it is not authentic.
    """
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    ours = secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(_GREETING + ours)
    answer = _read(sock, _NONCE_BYTES + _PROOF_BYTES)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"host", ours, theirs)):
        with suppress(OSError):
            sock.sendall(_REJECTED)
        raise HandshakeError(f"it has another {KEY_VARIABLE}")
    sock.sendall(_proof(key, b"core", ours, theirs))
    sock.settimeout(None)
    _watch_peer(sock)


def connect_to_core(address: tuple[str, int], key: bytes) -> socket.socket:
    """Connect to the core, and authenticate it.

    Raises:
        OSError: it is not reachable.
        EOFError: it has closed the connection.
        HandshakeError: it is not authentic.
    """
    sock = socket.create_connection(address, HANDSHAKE_TIMEOUT_S)
    try:
        greeting = _read(sock, len(_GREETING) + _NONCE_BYTES)
        if greeting[: len(_GREETING)] != _GREETING:
            raise HandshakeError("another program or another version of Penstock listens there")
        ours, theirs = secrets.token_bytes(_NONCE_BYTES), greeting[len(_GREETING) :]
        sock.sendall(ours + _proof(key, b"host", theirs, ours))
        if not hmac.compare_digest(_read(sock, _PROOF_BYTES), _proof(key, b"core", theirs, ours)):
            raise HandshakeError(f"it has another {KEY_VARIABLE}; set the same on all hosts")
        sock.settimeout(None)
        _watch_peer(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def watch_life(sock: socket.socket) -> None:
    """Let a connection end if what was sent on it is not acknowledged in time.

    Not for the channel of a rank, because it would also end if the rank does not read for that time.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, HOST_TIMEOUT_S * 1000)


def _watch_peer(sock: socket.socket) -> None:
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, HOST_TIMEOUT_S - 1),
    ):
        sock.setsockopt(level, option, value)


def _proof(key: bytes, role: bytes, core_nonce: bytes, host_nonce: bytes) -> bytes:
    return hmac.digest(key, role + core_nonce + host_nonce, "sha256")


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError("the other end has closed the connection")
        data += part
    return data
