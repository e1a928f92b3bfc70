"""A conversation continues after its engine dies: in the middle of a segment, or between two."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AsyncExitStack

import msgspec

from penstock.producer import Client, Conversation, Delta, SamplingParams, StreamingInput

from ..gate import Gate
from ..processes import DEADLINE_S, is_alive
from .conftest import Start
from .watching import beating, busiest, until

CHUNKS = ["count from four to nine:", " spell 12:", " four plus two is", " spell 407:"]
NUM_TOKENS = 40
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, presence_penalty=0.3)
GREEDY = msgspec.structs.replace(SEEDED, temperature=0.0)


async def read_segment(conversation: Conversation, deltas: list[Delta]) -> None:
    async for delta in conversation.segment():
        deltas.append(delta)  # noqa: PERF401  # each as it comes: the test looks at them meanwhile


async def kill_in_the_middle(url: str, role: str, outputs: list[list[Delta]]) -> None:
    """Kill -9 the process that runs the segments, once one has a few tokens; the gate lets none end before."""
    num_before = outputs[0][-1].next_index
    await until(lambda: any(deltas[-1].next_index > num_before + 5 for deltas in outputs), what="no segment starts")
    await kill(getattr(await busiest(url), f"{role}_pid"))


async def kill(pid: int) -> None:
    """Kill -9, and wait for the end: an ending process may get the next segment, and count as alive."""
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not is_alive(pid), what="a killed process lives on")


# The segment in which a worker process dies, and the one after it, have parameters of their own.
OWN = {
    2: SamplingParams(temperature=0.9, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True, frequency_penalty=0.4),
    3: SamplingParams(temperature=1.1, max_tokens=NUM_TOKENS, ignore_eos=True),  # its randomness is the conversation's
}


async def undisturbed(client: Client, params: SamplingParams) -> list[Delta]:
    async def chunks():
        for number, chunk in enumerate(CHUNKS):
            yield StreamingInput(chunk, OWN.get(number))

    return [delta async for delta in client.stream(chunks(), params)]


def told(deltas: list[Delta]) -> tuple:
    """Return the deltas that a subscriber saw, and check that indexes have no gap and no repeat."""
    indexes = [delta.index + i for delta in deltas for i in range(len(delta.token_ids))]
    assert indexes == list(range(NUM_TOKENS * len(CHUNKS)))
    assert [delta.finish_reason for delta in deltas if delta.finished] == ["length"]
    return (
        [token_id for delta in deltas for token_id in delta.token_ids],
        "".join(delta.text for delta in deltas),
        [end for delta in deltas for end in delta.segment_ends],
    )


async def test_conversations_outlive_every_engine_they_meet(start: Start, gate: Gate) -> None:
    stack = await start(2, "--deterministic")
    async with Client.connect(stack.url) as client, asyncio.timeout(DEADLINE_S), AsyncExitStack() as opened:
        wholes = [await undisturbed(client, params) for params in (GREEDY, SEEDED)]
        pair = [await opened.enter_async_context(client.converse(params)) for params in (GREEDY, SEEDED)]
        outputs: list[list[Delta]] = [[], []]
        for number, chunk in enumerate(CHUNKS):
            if number in (1, 2):
                gate.hold_at(NUM_TOKENS - 1)
            for conversation in pair:
                await conversation.send(chunk, OWN.get(number))
            reading = [asyncio.create_task(read_segment(*both)) for both in zip(pair, outputs, strict=True)]
            if number in (1, 2):
                await kill_in_the_middle(stack.url, "core" if number == 1 else "worker", outputs)
                gate.open()
            await asyncio.gather(*reading)
            if number == 0:  # no engine holds the requests now
                await kill((await beating(stack.url, 2))[0].core_pid)
        for conversation, deltas in zip(pair, outputs, strict=True):
            await conversation.close_input()
            deltas += [delta async for delta in conversation]
    assert [told(deltas) for deltas in outputs] == [told(deltas) for deltas in wholes]
