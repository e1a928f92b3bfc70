"""An engine of several ranks ends when one of them does; no request loses or repeats a token, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import re
import signal

import psutil
import pytest

from penstock.producer import Client, SamplingParams
from penstock.shared.deployment.records import EngineHeartbeat
from penstock.shared.messages.core import RankSetup

from ..gate import Gate
from ..processes import is_gone
from .conftest import Start
from .faulty_model import RAISE
from .test_poison import PARAMS as POISON_PARAMS
from .test_poison import await_parking
from .watching import (
    LONG,
    PARAMS,
    PROMPT,
    Watched,
    all_under_way,
    beating,
    busiest,
    finish,
    start_streams,
    undisturbed,
    until,
    until_logged,
)

RANKS = ("--tensor-parallel-size", "2", "--deterministic")
STAGES = ("--pipeline-parallel-size", "2", "--deterministic")
MANY = [
    SamplingParams(temperature=number % 2, seed=number, max_tokens=LONG - number, ignore_eos=True)
    for number in range(8)
]


def ranks_of(beat: EngineHeartbeat) -> RankSetup:
    assert beat.setup is not None
    assert beat.setup.ranks is not None
    return beat.setup.ranks


def pids_of(beat: EngineHeartbeat) -> list[int]:
    return ranks_of(beat).pids


def are_gone(processes: list[psutil.Process]) -> bool:
    return all(map(is_gone, processes))


async def test_two_ranks_make_the_tokens_of_one(start: Start, gate: Gate) -> None:
    alone = await start(1, "--deterministic")
    async with Client.connect(alone.url) as client:
        expected = await undisturbed(client)
    await asyncio.to_thread(alone.stop)
    stack = await start(1, *RANKS)
    async with Client.connect(stack.url) as client:
        outputs = await undisturbed(client)
    assert [answer.token_ids for answer in outputs] == [answer.token_ids for answer in expected]
    (beat,) = await beating(stack.url, 1)
    core, *others = pids_of(beat)
    assert core == beat.core_pid
    assert [psutil.Process(pid).ppid() for pid in others] == [core]
    assert len(set(ranks_of(beat).weight_bytes)) == 1
    ranks = [psutil.Process(pid) for pid in others]
    await asyncio.to_thread(stack.stop)
    await until(lambda: are_gone(ranks), what="ranks outlive their worker")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "the engine lost a rank: rank 1 (process {}) was killed by SIGKILL"),
        (signal.SIGSTOP, "its rank of process id {} was stopped by a signal"),
    ],
    ids=["killed", "stopped"],
)
async def test_generations_resume_when_a_rank_ends(
    start: Start, gate: Gate, number: signal.Signals, words: str
) -> None:
    stack = await start(2, *RANKS, "--stall-timeout", "8")
    async with Client.connect(stack.url) as client:
        whole, watched = await start_streams(client, gate, 3)
        beat = await busiest(stack.url)
        team = [psutil.Process(pid) for pid in pids_of(beat)]
        os.kill(pids_of(beat)[1], number)
        await finish(watched, whole, gate)
        await until(lambda: are_gone(team), what="what is left of the engine lives on")
        # The supervisor says so once the worker process has ended, which is after its core's processes are gone.
        assert words.format(pids_of(beat)[1]) in await until_logged(stack, '"is_external": true')
        # The next engine computes the same tokens.
        again = [Watched(client.stream(PROMPT, params)) for params in PARAMS]
        await finish(again, whole[: len(PARAMS)], gate)


async def test_batches_in_flight_in_both_stages_are_lost_with_a_rank_and_no_token_of_them(
    start: Start, gate: Gate
) -> None:
    stack = await start(2, *STAGES)
    async with Client.connect(stack.url) as client:
        whole = await undisturbed(client, MANY)
        gate.hold_at(LONG // 2)
        watched = [Watched(client.stream(PROMPT, params)) for params in MANY]
        await all_under_way(watched)
        gate.keep_in_flight()
        beat = await busiest(stack.url)
        assert beat.setup is not None
        team = [psutil.Process(pid) for pid in pids_of(beat)]
        await until(lambda: gate.keeps_flights_of(beat.core_pid), what="not every stage has a batch")
        os.kill(pids_of(beat)[1], signal.SIGKILL)
        # The core stands between two steps, in no collective that would raise.
        await until(lambda: are_gone(team), what="the core outlives its rank")
        await finish(watched, whole, gate)
        words = f"the engine lost a rank: rank 1 (process {pids_of(beat)[1]}) was killed by SIGKILL"
        assert words in await until_logged(stack, '"is_external": true')


async def test_generations_resume_at_the_restarted_engine_and_no_rank_outlives_its_core(
    start: Start, gate: Gate
) -> None:
    stack = await start(1, *RANKS)
    async with Client.connect(stack.url) as client:
        whole, watched = await start_streams(client, gate)
        (beat,) = await beating(stack.url, 1)
        team = [psutil.Process(pid) for pid in pids_of(beat)]
        os.kill(beat.core_pid, signal.SIGKILL)
        await until(lambda: are_gone(team), what="a rank outlives its core")
        await finish(watched, whole, gate)
        (beat,) = await beating(stack.url, 1)
    assert beat.num_restarts == 1
    assert not {process.pid for process in team} & set(pids_of(beat))


async def test_a_request_on_which_a_forward_raises_is_parked_for_the_engines_that_died(
    start_faulty: Start, gate: Gate
) -> None:
    """Its neighbours are not harmed."""
    stack = await start_faulty(1, *RANKS, "--max-deliveries", "2")
    async with Client.connect(stack.url) as client:
        whole = (await client.generate(PROMPT, POISON_PARAMS)).outputs[0]
        dead = await await_parking(client, stack, gate, RAISE, whole)
    assert dead.cause is not None
    # It raised on both, and who says so first is whoever gets his turn.
    assert re.fullmatch(
        r"the engine lost a rank: rank (1 failed|0): RuntimeError: a fault of one request", dead.cause.reason
    )
