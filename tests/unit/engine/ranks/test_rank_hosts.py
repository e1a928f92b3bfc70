"""A host joins an engine through real sockets, or is refused with the remedy; and how the end of its ranks is told."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from penstock.ops.lab.clusters.redis_processes import free_port
from penstock.shared.errors import ConfigurationError
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.ranks import KEY_VARIABLE, read_node_key
from penstock.worker.engine.ranks import host_agent
from penstock.worker.engine.ranks.host_link import (
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
)
from penstock.worker.engine.ranks.hosts import RemoteRank, SeveralHosts
from penstock.worker.engine.ranks.messages import RankChannel

KEY = b"0123456789abcdef"
HERE = "127.0.0.1"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, demo_model: Path) -> EngineConfig:
    """Return the configuration of an engine with a rank on host 0 and one on host 1."""
    monkeypatch.setenv(KEY_VARIABLE, KEY.decode())
    return EngineConfig(
        model=str(demo_model), tensor_parallel_size=2, nnodes=2, master_addr=HERE, master_port=free_port()
    )


class Engine:
    """Host 0, which waits in a thread."""

    def __init__(self, config: EngineConfig, model: Path, stack: ExitStack) -> None:
        self.hosts = SeveralHosts(config, model)
        self.ranks: list[RemoteRank] = []
        self._stack = stack
        self._waiting = threading.Thread(target=lambda: self.ranks.extend(self.hosts.gather()), daemon=True)
        self._waiting.start()

    def await_ranks(self) -> list[RemoteRank]:
        self._waiting.join(60)
        assert not self._waiting.is_alive()
        for rank in self.ranks:
            self._stack.callback(rank.close)
        return self.ranks


class PlayedHost:
    """Host 1, without processes."""

    def __init__(self, config: EngineConfig, model: Path, stack: ExitStack, **changes: object) -> None:
        self._address = (config.master_addr, config.master_port)
        self._stack = stack
        # Before the connection, because the engine waits only for some seconds for the offer.
        offer = HostOffer(
            1, "b", versions_here(), config.encode(), str(model), version_of_weights(config, model), time.monotonic_ns()
        )
        self.link = self._connect()
        self.link.send(msgspec.structs.replace(offer, **changes))
        self.answer = self.link.receive(60)

    def start(self, pid: int = 77) -> None:
        assert isinstance(self.answer, StartRanks)
        assert self.answer.ranks == [1]
        self._connect().send(RankOffer(1, self.answer.token))
        self.link.send(RanksStarted([pid]))

    def _connect(self) -> RankChannel:
        channel = RankChannel(connect_to_core(self._address, KEY), ToHost)
        self._stack.callback(channel.close)
        return channel


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_host_that_does_not_fit_is_refused_and_the_next_one_joins(
    config: EngineConfig, demo_model: Path, stack: ExitStack
) -> None:
    engine = Engine(config, demo_model, stack)
    here = socket.gethostname()
    other = msgspec.structs.replace(config, seed=7, model="/elsewhere", num_threads=3, node_rank=1)
    fitting = msgspec.structs.replace(other, seed=config.seed)
    versions = {**versions_here(), "torch": "1.0"}
    for changes, words in (
        ({"config_json": other.encode()}, f"seed is 7 on host b, and 0 on host {here}: give worker start the same"),
        ({"weights": "0000"}, "has other weights (0000) than that of host"),
        ({"versions": versions}, f"torch 1.0, transformers {versions['transformers']}, and host {here} has penstock"),
        ({"node_rank": 2}, "node_rank is 2 on host b, and nnodes is 2"),
    ):
        refused = PlayedHost(config, demo_model, stack, **changes).answer
        assert isinstance(refused, HostRefused)
        assert refused.is_final
        assert words in refused.reason
    # Its core logs why, and the program ends with the reason.
    with pytest.raises(ConfigurationError, match="refuses this host: seed is 7 on host"):
        host_agent._Host(other, demo_model, KEY).serve_one_core()
    with pytest.raises(ConfigurationError, match=f"another {KEY_VARIABLE}; set the same on all hosts"):
        host_agent._Host(fitting, demo_model, KEY[::-1]).serve_one_core()

    # A host that leaves before its ranks have started makes room for the next one; a second one does not.
    leaving = PlayedHost(config, demo_model, stack, config_json=fitting.encode())
    second = PlayedHost(config, demo_model, stack).answer
    assert isinstance(second, HostRefused)
    assert not second.is_final
    assert second.reason.startswith(f"node_rank 1 is taken by host b at {HERE}")
    leaving.link.close()
    while not isinstance((host := PlayedHost(config, demo_model, stack)).answer, StartRanks):
        pass
    host.start()
    (rank,) = engine.await_ranks()
    assert (rank.rank, rank.pid, rank.host) == (1, 77, f"b at {HERE}")


def test_a_connection_without_the_key_starts_nothing(config: EngineConfig, demo_model: Path, stack: ExitStack) -> None:
    with capture_logs() as events:
        engine = Engine(config, demo_model, stack)
        with socket.create_connection((HERE, config.master_port), 60) as stranger:
            stranger.sendall(bytes(64))
            # To the end, because the refusal may arrive after the greeting.
            with stranger.makefile("rb") as answer:
                assert answer.read().endswith(bytes(32))
        host = PlayedHost(config, demo_model, stack)
        assert isinstance(host.answer, StartRanks)
        # Nor does a rank that was not ordered.
        unordered = host._connect()
        unordered.send(RankOffer(1, "another token"))
        with pytest.raises(EOFError):
            unordered.receive(60)
        host.start()
        engine.await_ranks()
    reasons = [event["reason"] for event in events if event["event"] == "rank_host_refused"]
    assert reasons == [f"it has another {KEY_VARIABLE}", "rank 1 was not ordered from it"]


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        (HostEnded({1: -signal.SIGKILL}), -signal.SIGKILL, ("was killed by SIGKILL", True)),
        (HostEnded({1: -signal.SIGSEGV}), -signal.SIGSEGV, ("was killed by SIGSEGV", False)),
        (HostEnded({1: -signal.SIGKILL}, 1), -signal.SIGKILL, ("was killed because its host ran out of memory", False)),
        (HostEnded({1: 1}), 1, ("ended with exit status 1", False)),
        (HostEnded(), 1, ("was ended by its host after another rank", False)),
        (HostEnded(was_stopped=True), -signal.SIGKILL, ("was stopped together with its host", True)),
        (None, -signal.SIGKILL, ("is lost: its host is unreachable, or its worker start has ended", True)),
    ],
)
def test_the_end_of_a_rank_of_another_host(
    config: EngineConfig,
    demo_model: Path,
    stack: ExitStack,
    end: HostEnded | None,
    status: int,
    words: tuple[str, bool],
) -> None:
    engine = Engine(config, demo_model, stack)
    host = PlayedHost(config, demo_model, stack)
    host.start()
    (rank,) = engine.await_ranks()
    assert rank.poll() is None
    assert rank.describe_end() == ("is running", False)
    if end is not None:
        host.link.send(end)
    host.link.close()
    while rank.poll() is None:
        pass
    assert (rank.poll(), rank.describe_end()) == (status, words)
    rank.kill()


def test_hosts_need_a_key_and_a_free_address(config: EngineConfig, demo_model: Path) -> None:
    for environment in ({}, {KEY_VARIABLE: "short"}):
        with pytest.raises(ConfigurationError, match=f"nnodes needs {KEY_VARIABLE}"):
            read_node_key(environment)
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"nothing can listen at {HERE}:{port}"):
            SeveralHosts(msgspec.structs.replace(config, master_port=port), demo_model)
