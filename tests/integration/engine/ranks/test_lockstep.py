"""Two and three ranks that share the experts of a model, in processes of their own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.control.engine import ExecuteDummyBatch, IsSleeping, Sleep, SleepState, WakeUp
from penstock.shared.control.model import SaveShardedState
from penstock.shared.messages.core import LeaveWave, StartupFailed, StartWave, WavePhase
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.processes.ipc import GROUP_BROKEN

from ....processes import listening_at
from ..harness import generate, request
from .rank_processes import RankGroup

OPTIONS: dict[str, Any] = {"num_threads": 1, "max_num_seqs": 4, "kv_cache_memory": 1 << 21, "max_model_len": 200}
# Tokens: each is collectives in every layer.
LONG, SHORT = 12, 3


@pytest.fixture
def start(model_folder: Callable[[str], Path]) -> Iterator[Callable[..., RankGroup]]:
    groups: list[RankGroup] = []

    def make(name: str, size: int, **how: float) -> RankGroup:
        groups.append(RankGroup(EngineConfig(model=str(model_folder(name)), **OPTIONS), size, **how))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


@pytest.fixture
def alone(make_core: Callable[..., EngineCore], prompts: list[list[int]]) -> Callable[[str, int], list[list[int]]]:
    """Return what an engine that has all experts makes of the prompts."""

    def make(name: str, max_tokens: int) -> list[list[int]]:
        core = make_core(
            name, **{key: value for key, value in OPTIONS.items() if "thread" not in key and "kv" not in key}
        )
        told = generate(core, [request(str(i), prompt, max_tokens=max_tokens) for i, prompt in enumerate(prompts)])
        return [told[str(i)] for i in range(len(prompts))]

    return make


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_ranks_make_the_tokens_that_an_engine_alone_makes(
    name: str,
    start: Callable[..., RankGroup],
    prompts: list[list[int]],
    alone: Callable[[str, int], list[list[int]]],
) -> None:
    expected = alone(name, LONG)
    group = start(name, 2)
    assert {ready.num_shared_experts for ready in group.await_ready()} == {{"mixtral": 4, "qwen3_moe": 6}[name]}
    # The second rank has one request, and is done long before the first.
    of_rank = [[0, 1, 2, 3, 4], [5]]
    for rank, numbers in zip(group.ranks, of_rank, strict=True):
        for number in numbers:
            rank.core.send(request(str(number), prompts[number], max_tokens=LONG if number < 5 else SHORT))
    for rank, numbers in zip(group.ranks, of_rank, strict=True):
        rank.until(lambda rank=rank, numbers=numbers: len(rank.ended) == len(numbers), "a request has not ended")
        assert rank.errors == []
        for number in numbers:
            assert rank.tokens[str(number)] == expected[number][: LONG if number < 5 else SHORT]
    first = group.await_idle()
    assert first >= 1
    # The next wave begins with whichever rank has work, whatever is still on its way of the last one.
    group.ranks[0].core.send(StartWave(first - 1))
    group.ranks[1].core.send(request("again", prompts[2], max_tokens=3))
    group.ranks[1].until(lambda: "again" in group.ranks[1].ended, "a request has not ended")
    assert group.ranks[1].tokens["again"] == expected[2][:3]
    assert group.await_idle() == first + 1


def test_ranks_sleep_and_wake_up_together(start: Callable[..., RankGroup], prompts: list[list[int]]) -> None:
    group = start("mixtral", 2)
    group.await_ready()
    first, second = group.ranks
    first.ask(Sleep(level=1), 1)
    # Meanwhile it computes for the other.
    second.core.send(request("before", prompts[0], max_tokens=4))
    second.until(lambda: "before" in second.ended, "a request has not ended")
    assert 1 not in first.answers
    second.ask(Sleep(level=1), 1)
    for rank in group.ranks:
        answer = rank.answer(1)
        assert answer.error is None, answer.error
        assert isinstance(answer.answer, SleepState)
        assert answer.answer.is_sleeping
        rank.until(lambda rank=rank: rank.waves[-1].phase is WavePhase.PAUSED, "not paused")
    first.ask(WakeUp(), 2)
    assert first.answer(2).error is None
    # One that is awake waits for the other, and says so in no way but that it does not answer.
    first.core.send(request("after", prompts[0], max_tokens=4))
    first.ask(IsSleeping(), 3)
    assert first.answer(3).error is None
    assert "after" not in first.tokens
    second.ask(WakeUp(), 2)
    first.until(lambda: "after" in first.ended, "a request has not ended")
    assert first.tokens["after"] == second.tokens["before"]
    for call_id, call in ((10, ExecuteDummyBatch()), (11, SaveShardedState(path="/tmp/x"))):
        first.ask(call, call_id)
        error = first.answer(call_id).error
        assert error is not None
        assert "data-parallel group" in error.message


def test_ranks_listen_at_their_address_alone(start: Callable[..., RankGroup]) -> None:
    """Neither the rendezvous store nor gloo authenticates its callers."""
    group = start("mixtral", 2)
    group.await_ready()
    listening = [listening_at(rank.core.process.pid) for rank in group.ranks]
    assert group.address in listening[0]
    for addresses in listening:
        assert {address.rpartition(":")[0] for address in addresses} == {"127.0.0.1"}


def test_all_ranks_leave_when_one_is_stopped(start: Callable[..., RankGroup], prompts: list[list[int]]) -> None:
    group = start("mixtral", 2)
    group.await_ready()
    for rank in group.ranks:
        rank.core.send(request("long", prompts[0], max_tokens=None))
        rank.until(lambda rank=rank: rank.tokens, "no token")
    group.ranks[0].core.send(LeaveWave())
    for rank in group.ranks:
        rank.until(lambda rank=rank: rank.waves[-1].phase is WavePhase.LEFT, "it has not left")
    # And nothing is computed any more.
    group.ranks[1].core.send(request("later", prompts[0]))
    group.ranks[1].ask(IsSleeping(), 1)
    assert group.ranks[1].answer(1).error is None
    assert "later" not in group.ranks[1].tokens


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_other_ranks_end_when_one_has_exited(
    number: signal.Signals, start: Callable[..., RankGroup], prompts: list[list[int]]
) -> None:
    group = start("qwen3_moe", 3, timeout_s=15.0)
    group.await_ready()
    for rank in group.ranks[:2]:
        rank.core.send(request("long", prompts[0], max_tokens=None))
        rank.until(lambda rank=rank: len(rank.tokens.get("long", ())) > 3, "no token")
    *others, victim = group.ranks
    victim.core.process.send_signal(number)
    for rank in others:
        # Should the others be idle by now: they meet again.
        with suppress(OSError):
            rank.core.send(request("later", prompts[1]))
    for rank in others:
        rank.until(lambda rank=rank: rank.last_words, "it lives on")
        assert rank.status == GROUP_BROKEN
        assert "GroupBrokenError" in rank.last_words


def test_a_dense_model_is_refused_with_the_remedy(start: Callable[..., RankGroup]) -> None:
    group = start("llama", 2)
    for rank in group.ranks:
        rank.until(lambda rank=rank: rank.started is not None, "not started")
        assert isinstance(rank.started, StartupFailed)
        assert "start more engines" in rank.started.message
