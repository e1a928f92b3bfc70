"""The hosts of an engine as its core sees them: how they join it, and the ranks on other hosts."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import structlog

from ....shared.errors import ConfigurationError
from ....shared.values.shown import shown
from ...config.engine_config import EngineConfig
from ...config.ranks import read_node_key
from ...models.parallel.meeting import FileMeeting, Meeting, NetworkMeeting, listen, make_rendezvous
from .host_link import (
    HANDSHAKE_TIMEOUT_S,
    FromHost,
    HandshakeError,
    HostEnded,
    HostOffer,
    HostRefused,
    RankOffer,
    RanksStarted,
    StartRanks,
    accept_host,
    version_of_weights,
    versions_here,
    watch_life,
)
from .messages import RankAnswer, RankChannel, RankConfigure
from .process import describe_exit

# How long a host that accepted an order has for its next message, and a killed rank to end.
_ANSWER_TIMEOUT_S = 60.0
_KILL_TIMEOUT_S = 2.0
# Options that hosts may have for themselves.
_OWN_OPTIONS = frozenset({"model", "num_threads", "node_rank"})

log = structlog.get_logger(__name__)


class RankHost:
    """A host that runs ranks of this engine, and the connection whose end shows its own."""

    def __init__(self, link: RankChannel, offer: HostOffer, address: str, ranks: list[int]) -> None:
        self.link = link
        self.name = f"{offer.name} at {address}"
        self.node_rank = offer.node_rank
        self.address = address
        self.config_json = offer.config_json
        self.folder = offer.folder
        self.clock_offset_ns = time.monotonic_ns() - offer.clock_ns
        self.ranks = ranks
        self.token = secrets.token_hex(16)
        self.channels: dict[int, RankChannel] = {}
        self.pids: list[int] = []
        self.is_lost = False
        self._end: HostEnded | None = None
        self._polling = threading.Lock()
        self._is_closed = False

    @property
    def is_complete(self) -> bool:
        """Whether all its ranks have started and are connected."""
        return len(self.pids) == len(self.channels) == len(self.ranks)

    def poll(self) -> HostEnded | None:
        """Return how it ended; None while it runs."""
        with self._polling:
            if self._end is None:
                try:
                    self._end = self._receive(0.0)
                except EOFError:
                    self.is_lost, self._end = True, HostEnded()
            return self._end

    def receive(self) -> None:
        """Handle a message that it sends while it starts.

        Raises:
            EOFError: the connection has ended.
        """
        message = self.link.receive(_ANSWER_TIMEOUT_S)
        if not isinstance(message, RanksStarted):
            raise EOFError("its ranks have ended")
        self.pids = message.pids

    def kill(self) -> None:
        """Have it kill its ranks, and wait for their end unless it is unreachable; do nothing after their end."""
        if self.poll() is None:
            self.link.shut_down()
            select.select([self.link], [], [], _KILL_TIMEOUT_S)

    def close(self) -> None:
        """Close all connections. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            for channel in (self.link, *self.channels.values()):
                channel.close()

    def _receive(self, timeout_s: float) -> HostEnded | None:
        message = self.link.receive(timeout_s)
        return message if isinstance(message, HostEnded) else None


class RemoteRank:
    """A rank on another host; has the methods of ``RankProcess``.

    Its ``pidfd`` is the connection to its host, which becomes readable once all ranks of that host have ended.
    """

    is_stopped = False

    def __init__(self, rank: int, host: RankHost) -> None:
        self._host = host
        self.rank = rank
        self.host = host.name
        self.clock_offset_ns = host.clock_offset_ns
        self.pid = host.pids[host.ranks.index(rank)]
        self.pidfd = host.link.fileno()
        self.channel = host.channels[rank]

    def configure(self, message: RankConfigure) -> None:
        """Send its configuration, with the folder and threads of its host."""
        here = {"config_json": self._host.config_json, "folder": self._host.folder, "own_host": self._host.address}
        self.channel.send(msgspec.structs.replace(message, **here))

    def poll(self) -> int | None:
        """Return its exit status like ``Popen.returncode``; of a lost or stopped host that of a killed process."""
        end = self._host.poll()
        if end is None:
            return None
        if self._host.is_lost or end.was_stopped:
            return -signal.SIGKILL
        # The host has ended the others after the first one; their end is no cause.
        return end.exits.get(self.rank, 1)

    def kill(self) -> None:
        self._host.kill()

    def close(self) -> None:
        self._host.close()

    def describe_end(self) -> tuple[str, bool]:
        """Return how it ended, as ``RankProcess`` does."""
        end = self._host.poll()
        if end is None:
            return "is running", False
        if self._host.is_lost:
            return "is lost: its host is unreachable, or its worker start has ended", True
        if end.was_stopped:
            return "was stopped together with its host", True
        if self.rank not in end.exits:
            return "was ended by its host after another rank", False
        if end.num_oom_kills and end.exits[self.rank] == -signal.SIGKILL:
            return "was killed because its host ran out of memory", False
        return describe_exit(end.exits[self.rank])


class OneHost:
    """The host of an engine whose ranks are all children of the core."""

    def __init__(self) -> None:
        self.rendezvous_fd = make_rendezvous()
        self._is_used = False

    def gather(self) -> list[RemoteRank]:
        """Return the ranks of other hosts."""
        return []

    def meeting(self) -> Meeting:
        """Return where the ranks meet. Afterwards the descriptor stays open, see ``FileMeeting``."""
        self._is_used = True
        return FileMeeting(self.rendezvous_fd)

    def close(self) -> None:
        """Close an unused descriptor. A second call does nothing."""
        if not self._is_used:
            self._is_used = True
            os.close(self.rendezvous_fd)


class SeveralHosts:
    """Like ``OneHost``, for an engine of several hosts, which this one waits for.

    Raises:
        ConfigurationError: the key is missing, or the address cannot be used.
    """

    rendezvous_fd = -1

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self._key = read_node_key()
        if config.node_rank:
            raise ConfigurationError(
                f"node_rank {config.node_rank} runs ranks for the engine of node_rank 0; start it with worker start"
            )
        self._config = config
        self._weights = version_of_weights(config, folder)
        self._versions = versions_here()
        self._hosts: dict[int, RankHost] = {}
        self._listener = self._listen(config.master_port)
        log.info("rank_hosts_awaited", address=f"{config.master_addr}:{config.master_port}", hosts=config.nnodes - 1)

    def meeting(self) -> Meeting:
        """Return where the ranks meet: at a free port."""
        host = self._config.master_addr
        listener = self._listen(0)
        port = listener.getsockname()[1]
        return NetworkMeeting(host, port, host, listener.detach())

    def close(self) -> None:
        """Do nothing, because the listener is closed and the team closes the connections."""

    def _listen(self, port: int) -> socket.socket:
        host = self._config.master_addr
        try:
            return socket.socket(fileno=listen(host, port))
        except OSError as error:
            raise ConfigurationError(
                f"master_addr and master_port: nothing can listen at {host}:{port} ({error}); host 0 needs its address "
                "and a free port"
            ) from error

    def gather(self) -> list[RemoteRank]:
        """Return the ranks of all other hosts, in order, once all have started.

        Waits without limit: the worker process ends a core that makes no progress.
        """
        hosts = self._hosts
        try:
            while len(hosts) < self._config.nnodes - 1 or not all(host.is_complete for host in hosts.values()):
                readable = select.select([self._listener, *(host.link for host in hosts.values())], [], [])[0]
                for host in [host for host in hosts.values() if host.link in readable]:
                    self._read(host)
                if self._listener in readable:
                    self._accept()
        except BaseException:
            for host in hosts.values():
                host.close()
            raise
        finally:
            self._listener.close()
        return [RemoteRank(rank, host) for _, host in sorted(hosts.items()) for rank in host.ranks]

    def _read(self, host: RankHost) -> None:
        try:
            host.receive()
        except (EOFError, msgspec.DecodeError) as error:
            log.warning("rank_host_lost", host=host.name, error=str(error))
            host.close()
            del self._hosts[host.node_rank]

    def _accept(self) -> None:
        """Accept a connection, and handle its first message. A peer that does not send it in time is dropped."""
        sock, (address, *_) = self._listener.accept()
        try:
            accept_host(sock, self._key)
            link = RankChannel(sock, FromHost)
            message = link.receive(HANDSHAKE_TIMEOUT_S)
            if isinstance(message, HostOffer):
                watch_life(sock)
                self._answer(link, message, address)
            elif isinstance(message, RankOffer):
                self._attach(sock, message)
            else:
                sock.close()
        except (OSError, EOFError, HandshakeError, msgspec.DecodeError) as error:
            log.warning("rank_host_refused", address=address, reason=str(error) or type(error).__name__)
            sock.close()

    def _answer(self, link: RankChannel, offer: HostOffer, address: str) -> None:
        refusal = self._refusal(offer)
        if refusal is not None:
            log.warning("rank_host_refused", address=address, reason=refusal.reason)
            link.send(refusal)
            link.close()
            return
        num_ranks = self._config.num_ranks_on_host
        first = offer.node_rank * num_ranks
        host = RankHost(link, offer, address, list(range(first, first + num_ranks)))
        link.send(StartRanks(host.ranks, host.token))
        self._hosts[offer.node_rank] = host
        log.info("rank_host_joined", host=host.name, address=address, ranks=host.ranks)

    def _attach(self, sock: socket.socket, offer: RankOffer) -> None:
        for host in self._hosts.values():
            if offer.rank in host.ranks and secrets.compare_digest(offer.token, host.token):
                host.channels[offer.rank] = RankChannel(sock, RankAnswer)
                return
        raise HandshakeError(f"rank {offer.rank} was not ordered from it")

    def _refusal(self, offer: HostOffer) -> HostRefused | None:
        name, here = offer.name, socket.gethostname()
        if not 0 < offer.node_rank < self._config.nnodes:
            return HostRefused(
                f"node_rank is {offer.node_rank} on host {name}, and nnodes is {self._config.nnodes} on host {here}: "
                "number the hosts from 0",
                is_final=True,
            )
        if offer.versions != self._versions:
            return HostRefused(
                f"host {name} has {_listed(offer.versions)}, and host {here} has {_listed(self._versions)}: install "
                "the same versions on both",
                is_final=True,
            )
        theirs = EngineConfig.decode(offer.config_json)
        for field in EngineConfig.__struct_fields__:
            values: list[Any] = [getattr(theirs, field), getattr(self._config, field)]
            if field not in _OWN_OPTIONS and values[0] != values[1]:
                return HostRefused(
                    f"{field} is {shown(values[0])} on host {name}, and {shown(values[1])} on host {here}: give worker "
                    "start the same options on both",
                    is_final=True,
                )
        if offer.weights != self._weights:
            return HostRefused(
                f"the model in {offer.folder} on host {name} has other weights ({offer.weights}) than that of host "
                f"{here} ({self._weights}): copy the model's folder again",
                is_final=True,
            )
        if offer.node_rank in self._hosts:
            return HostRefused(
                f"node_rank {offer.node_rank} is taken by host {self._hosts[offer.node_rank].name}: give each host "
                "its own",
                is_final=False,
            )
        return None


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())
