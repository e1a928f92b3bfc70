"""The rank to blame for the end of an engine of several ranks, however late the end of a rank can be seen."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from penstock.worker.engine.ranks import team as team_module
from penstock.worker.engine.ranks.messages import (
    CallMethod,
    MeasureBlock,
    MethodDone,
    RankAnswer,
    RankChannel,
    RankFailed,
    RankLoaded,
)
from penstock.worker.engine.ranks.process import RankProcess
from penstock.worker.engine.ranks.team import RankKilledError, RankLostError, RankTeam

# gloo's message about a rank whose sockets are closed.
CLOSED = RuntimeError("Connection closed by peer [127.0.0.1]")


class PlayedRank(RankProcess):
    """A process that does nothing; the test has the rank's end of the socket, too."""

    def __init__(self, rank: int, stack: ExitStack) -> None:
        self.rank = rank
        self._returncode = None
        ours, theirs = socket.socketpair()
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        stack.enter_context(process)
        stack.callback(process.kill)
        self.played = process
        self.pid = process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.channel = RankChannel(ours, RankAnswer)
        self.its_end = RankChannel(theirs, Any)
        stack.callback(self.close)
        stack.callback(self.its_end.close)

    def end(self) -> None:
        """End the rank as if by itself; the next reader of its status is the first."""
        assert self.played.stdin is not None
        self.played.stdin.write(b"\n")
        self.played.stdin.flush()
        select.select([self.pidfd], [], [])


WATCH = RankTeam._watch


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PlayedRank]]:
    # The thread would end this process; and no rank has time.
    monkeypatch.setattr(RankTeam, "_watch", lambda team: None)
    monkeypatch.setattr(team_module, "GRACE_S", 0.0)
    with ExitStack() as stack:
        yield [PlayedRank(rank, stack) for rank in (1, 2)]


def test_a_kill_is_reported_as_one_even_if_the_process_ends_long_after_its_sockets(
    ranks: list[PlayedRank],
) -> None:
    """Another rank, which failed for it, has ended and said so before: the requests are not to blame."""
    team = RankTeam(ranks, timeout_s=60)
    killed, failed = ranks
    failed.its_end.send(RankFailed("", "RuntimeError: Connection closed by peer", at_ns=1))
    failed.its_end.close()
    failed.end()
    killed.its_end.close()

    def kill() -> None:
        team._is_noticed.wait()
        os.kill(killed.pid, signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    verdict = team.loss(CLOSED)
    killing.join()
    assert isinstance(verdict, RankKilledError)
    assert str(verdict) == f"rank 1 (process {killed.pid}) was killed by SIGKILL"
    assert team.loss(CLOSED) is verdict


def test_a_failure_of_rank_0_alone_is_reported_immediately(ranks: list[PlayedRank]) -> None:
    team = RankTeam(ranks, timeout_s=60)
    verdict = team.loss(ValueError("here alone"))
    assert type(verdict) is RankLostError
    assert str(verdict) == "rank 0: ValueError: here alone"
    assert all(rank.poll() == -signal.SIGKILL for rank in ranks)


def test_words_of_a_rank_that_has_not_ended_yet_are_enough(ranks: list[PlayedRank]) -> None:
    team = RankTeam(ranks, timeout_s=60)
    ranks[1].its_end.send(RankFailed("", "KernelInputError: no", at_ns=1))
    assert str(team.loss(CLOSED)) == "rank 2 failed: KernelInputError: no"


def test_a_refused_rank_does_not_wait_for_others(ranks: list[PlayedRank], monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch gives the core time to end by itself, and no more than the core takes."""
    monkeypatch.setattr(RankTeam, "_watch", WATCH)
    monkeypatch.setattr(team_module, "LOAD_GRACE_S", 1e6)
    team = RankTeam(ranks, timeout_s=60)
    for rank in ranks:
        rank.its_end.send(RankFailed("configuration_error", "no", at_ns=1))
        rank.its_end.close()
        rank.end()
        monkeypatch.setattr(rank, "close", lambda: None)  # the fixture does
    assert str(team.failed_load(CLOSED)) == "no"
    team.stop()
    assert not team._watching.is_alive()


def test_answers_reach_the_threads_that_asked(ranks: list[PlayedRank]) -> None:
    """The thread that asked last receives first, and also the answers that the other thread waits for."""
    team = RankTeam(ranks, timeout_s=60)
    for number, rank in enumerate(ranks):
        for answer in (RankLoaded(), MethodDone(["first", number]), MethodDone(["second", number])):
            rank.its_end.send(answer)
    first, second = (team.ask_ranks(CallMethod(name, [], {})) for name in ("first", "second"))
    for name, question in (("second", second), ("first", first)):
        results = [answer.result for answer in team.gather(question) if isinstance(answer, MethodDone)]
        assert results == [[name, 0], [name, 1]]
    assert [type(answer) for answer in team.gather(team.loading)] == [RankLoaded, RankLoaded]


def test_the_words_of_a_rank_that_ends_are_no_answer(ranks: list[PlayedRank]) -> None:
    """A step has failed while another thread waits for blocks."""
    team = RankTeam(ranks, timeout_s=60)
    ranks[0].its_end.send(RankLoaded())
    question = team.ask_ranks(MeasureBlock())
    ranks[0].its_end.send(RankFailed("", "KernelInputError: no", at_ns=1, has_ended=True))
    ranks[1].its_end.send(RankLoaded())
    with pytest.raises(RankLostError, match="rank 1 failed: KernelInputError: no"):
        team.gather(question)


def test_several_threads_receive_whole_messages() -> None:
    ours, theirs = socket.socketpair()
    channel, its_end = RankChannel(ours, Any), RankChannel(theirs, Any)
    received: list[Any] = []

    def receive() -> None:
        with suppress(EOFError):
            while True:
                received.append(channel.receive(60))

    threads = [threading.Thread(target=receive) for _ in range(4)]
    for thread in threads:
        thread.start()
    messages = [[number] * 1000 for number in range(200)]
    for message in messages:
        its_end.send(message)
    its_end.close()
    for thread in threads:
        thread.join()
    channel.close()
    assert sorted(received) == messages
