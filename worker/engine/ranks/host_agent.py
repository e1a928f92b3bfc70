"""Runs the ranks of an engine whose core is on another host: ``worker start`` with ``--node-rank 1`` or more.

It offers its ranks to the core, runs them as long as the connection to the core lasts, and offers them again. Its ranks
never outlive a connection, so no rank of an earlier core computes when the next one starts.
"""

from __future__ import annotations

import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import structlog

from ....shared.errors import ConfigurationError
from ...config.engine_config import EngineConfig
from ...config.ranks import read_node_key
from ...models.checkpoint.folder import resolve_model_folder
from ...processes.host import num_oom_kills
from .host_link import (
    HandshakeError,
    HostEnded,
    HostOffer,
    HostRefused,
    RankOffer,
    RanksStarted,
    StartRanks,
    ToHost,
    connect_to_core,
    version_of_weights,
    versions_here,
    watch_life,
)
from .messages import RankChannel
from .process import RankChild

# Between two attempts to reach the core, which listens only while it starts.
_RETRY_S = 0.5
_ANSWER_TIMEOUT_S = 60.0
# How long ranks have to end by themselves after the first one has, which may be its cause or its consequence.
_END_GRACE_S = 1.0

log = structlog.get_logger(__name__)


class _StoppedError(BaseException):
    """An operator stops this host."""


def run_ranks(config: EngineConfig, announce: Callable[[], None]) -> None:
    """Run the ranks of this host until it is stopped by a signal.

    Args:
        announce: called once this host waits for the core.

    Raises:
        ConfigurationError: an option is wrong, or the core refuses this host; the message has the remedy.
        ModelLoadError: the model cannot be read.
    """
    key = read_node_key()
    folder = resolve_model_folder(config.model, needs_weights=config.needs_weights)
    host = _Host(config, folder, key)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    with suppress(_StoppedError):
        announce()
        while True:
            host.serve_one_core()


def _stop(_number: int, _frame: object) -> NoReturn:
    raise _StoppedError


class _Host:
    def __init__(self, config: EngineConfig, folder: Path, key: bytes) -> None:
        self._config = config
        self._folder = folder
        self._weights = version_of_weights(config, folder)
        self._versions = versions_here()
        self._address = (config.master_addr, config.master_port)
        self._key = key
        self._reason = ""

    def serve_one_core(self) -> None:
        """Offer the ranks, and run them for one core; return once all have ended."""
        try:
            sock = connect_to_core(self._address, self._key)
        except (OSError, EOFError) as error:
            self._wait(str(error) or type(error).__name__)
            return
        except HandshakeError as error:
            raise ConfigurationError(f"the engine at {self._described_address}: {error}") from error
        watch_life(sock)
        link = RankChannel(sock, ToHost)
        try:
            self._serve(link)
        except (OSError, EOFError, HandshakeError) as error:
            self._wait(str(error))
        finally:
            link.close()

    @property
    def _described_address(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"

    def _wait(self, reason: str) -> None:
        """Log a new reason, and wait before the next attempt."""
        if reason != self._reason:
            self._reason = reason
            log.info("rank_host_waits", address=self._described_address, reason=reason)
        time.sleep(_RETRY_S)

    def _serve(self, link: RankChannel) -> None:
        link.send(
            HostOffer(
                self._config.node_rank,
                socket.gethostname(),
                self._versions,
                self._config.encode(),
                str(self._folder),
                self._weights,
                time.monotonic_ns(),
            )
        )
        answer = link.receive(_ANSWER_TIMEOUT_S)
        if isinstance(answer, HostRefused):
            if answer.is_final:
                raise ConfigurationError(f"the engine at {self._described_address} refuses this host: {answer.reason}")
            self._wait(answer.reason)
        elif isinstance(answer, StartRanks):
            self._run(link, answer)
        else:
            self._wait("no answer")

    def _run(self, link: RankChannel, order: StartRanks) -> None:
        """Start the ranks, and end all of them when one ends, the core disconnects or this host is stopped."""
        if self._config.device == "cpu":
            # Imported once, so that ranks are forked with the imported modules, and not before this host is accepted.
            from . import follower  # noqa: F401
        oom_kills = num_oom_kills()
        ranks: list[RankChild] = []
        end = HostEnded()
        try:
            ranks.extend(self._start_rank(rank, order.token) for rank in order.ranks)
            self._reason = ""
            link.send(RanksStarted([rank.pid for rank in ranks]))
            pids = [rank.pid for rank in ranks]
            log.info("host_ranks_started", address=self._described_address, ranks=order.ranks, pids=pids)
            select.select([link, *(rank.pidfd for rank in ranks)], [], [])
            exits = _exits_of(ranks, link)
            end = HostEnded(exits, num_oom_kills() - oom_kills)
        except _StoppedError:
            end = HostEnded(was_stopped=True)
            raise
        finally:
            for rank in ranks:
                rank.kill()
                rank.close()
            with suppress(OSError):  # the core has ended
                link.send(end)
            log.info("host_ranks_ended", address=self._described_address, exits=end.exits)

    def _start_rank(self, rank: int, token: str) -> RankChild:
        sock = connect_to_core(self._address, self._key)
        # The rank's process closes it, and this one, which only sends a message on it, must not read from it.
        RankChannel(sock, ToHost).send(RankOffer(rank, token))
        return RankChild(rank, sock, -1, may_fork=self._config.device == "cpu")


def _exits_of(ranks: list[RankChild], link: RankChannel) -> dict[int, int]:
    """Return the exit statuses of the ranks that have ended; wait for the others shortly, unless the core is gone."""
    give_up_at = time.monotonic() + _END_GRACE_S
    while running := [rank.pidfd for rank in ranks if rank.poll() is None]:
        ready = select.select([link, *running], [], [], max(0.0, give_up_at - time.monotonic()))[0]
        if not ready or link in ready:
            break
    return {rank.rank: status for rank in ranks if (status := rank.poll()) is not None}
