"""A subscriber's view of a generation, which equals its view without the fault."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, CompletionOutput, Delta, SamplingParams
from penstock.shared.broker import Broker
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.presence import read_heartbeats
from penstock.shared.deployment.records import EngineHeartbeat
from penstock.shared.keys import Keys

from ..gate import Gate
from ..processes import DEADLINE_S, is_alive

PROMPT = "count from four to nine:"
# Twice as many tokens as show that a stream runs.
LONG = 32
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=LONG, ignore_eos=True),
    SamplingParams(
        temperature=0.9,
        top_p=0.9,
        seed=4,
        max_tokens=LONG,
        min_tokens=LONG,
        presence_penalty=0.3,
        frequency_penalty=0.01,
        repetition_penalty=1.05,
        logprobs=2,
    ),
    SamplingParams(temperature=1.0, seed=11, max_tokens=LONG, ignore_eos=True, stop=["eleven hundred", "zzz"]),
]


class Watched:
    """A stream that is followed in the background."""

    def __init__(self, stream: AsyncIterator[Delta]) -> None:
        self.deltas: list[Delta] = []
        self.times: list[float] = []
        self.task = asyncio.create_task(self._follow(stream))

    @property
    def num_tokens(self) -> int:
        return self.deltas[-1].next_index if self.deltas else 0

    def num_tokens_of(self, child: int) -> int:
        return sum(len(delta.token_ids) for delta in self.deltas if delta.child == child)

    async def _follow(self, stream: AsyncIterator[Delta]) -> None:
        async for delta in stream:
            self.deltas.append(delta)
            self.times.append(time.monotonic())

    def check(self, whole: CompletionOutput) -> None:
        """Each token of this answer once and in order, one end, and everything as in the undisturbed run."""
        deltas = [delta for delta in self.deltas if delta.child == whole.index]
        indexes = [delta.index + i for delta in deltas for i in range(len(delta.token_ids))]
        assert indexes == list(range(len(whole.token_ids)))
        assert [delta.finish_reason for delta in deltas if delta.finished] == [whole.finish_reason]
        assert [token_id for delta in deltas for token_id in delta.token_ids] == list(whole.token_ids)
        assert "".join(delta.text for delta in deltas) == whole.text
        assert [token for delta in deltas for token in delta.logprobs] == (whole.logprobs or [])

    def next_token_after(self, moment: float) -> float:
        """Seconds from ``moment`` to the next delta."""
        return next(t for t in self.times if t > moment) - moment


async def undisturbed(client: Client, params: list[SamplingParams] = PARAMS) -> list[CompletionOutput]:
    outputs = await asyncio.gather(*(client.generate(PROMPT, one) for one in params))
    return [output.outputs[0] for output in outputs]


async def until(condition: Callable[[], object], timeout_s: float = 150.0, what: str = "") -> None:
    """Wait for something that another process does."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, what
        await asyncio.sleep(0.02)


async def log_of(stack: LocalStack) -> str:
    """Return the log of the first host of workers."""
    return await asyncio.to_thread(lambda: stack.workers[0].log)


async def until_logged(stack: LocalStack, text: str, number: int = 1) -> str:
    """Wait until the log contains ``text`` this often, and return the log."""
    async with asyncio.timeout(DEADLINE_S):
        while (log := await log_of(stack)).count(text) < number:
            await asyncio.sleep(0.05)
    return log


async def all_under_way(watched: list[Watched], num_tokens: int = LONG // 2) -> None:
    """Wait until each stream has this many tokens; the caller's gate lets none of them end."""
    await until(lambda: all(one.num_tokens >= num_tokens for one in watched), what="the streams do not start")
    assert not any(one.task.done() for one in watched), "a stream had ended before the fault"


async def start_streams(client: Client, gate: Gate, times: int = 1) -> tuple[list[CompletionOutput], list[Watched]]:
    """Return the undisturbed outputs of ``PARAMS``, each ``times`` over, and running streams of the same parameters.

    They cannot end before ``gate`` is opened, as ``finish`` does.
    """
    whole = await undisturbed(client)
    gate.hold_at(LONG - 1)
    watched = [Watched(client.stream(PROMPT, params)) for params in PARAMS * times]
    await all_under_way(watched)
    return whole * times, watched


async def finish(watched: list[Watched], whole: list[CompletionOutput], gate: Gate) -> None:
    """Let all go on, wait for the ends and check everything that was seen."""
    gate.open()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(one.task for one in watched))
    for one, expected in zip(watched, whole, strict=True):
        one.check(expected)


async def engines(url: str) -> list[EngineHeartbeat]:
    """The heartbeats that have not expired."""
    commands = CommandConnection(url)
    try:
        return await read_heartbeats(commands.execute, Keys())
    finally:
        await commands.close()


async def beating(url: str, number: int) -> list[EngineHeartbeat]:
    """Return the heartbeats of this many engines with living processes, as soon as there are.

    It waits for engines that were restarted, or could not write for as long as a heartbeat lives.
    """
    async with asyncio.timeout(DEADLINE_S):
        while len(beats := living_engines(await engines(url))) != number:
            await asyncio.sleep(0.05)
    return beats


def living_engines(beats: list[EngineHeartbeat]) -> list[EngineHeartbeat]:
    """Return engines with living processes: a heartbeat may be of a life that ended up to a second ago."""
    return [beat for beat in beats if is_alive(beat.worker_pid) and is_alive(beat.core_pid)]


async def busiest(url: str) -> EngineHeartbeat:
    """Return the engine that holds most requests at this moment, by the claims; its processes are alive.

    Heartbeats are up to a second old. After a fault the claims may be of a process that has died, or of one that
    no heartbeat names yet: this waits until a living one holds some, or until no process holds any.
    """
    commands = CommandConnection(url)
    broker = Broker(commands, Keys().model("demo"))
    give_up_at = time.monotonic() + 60.0
    try:
        while True:
            beats = await read_heartbeats(commands.execute, Keys())
            num_claims = {beat.engine_id: len(await broker.claims(beat.engine_id)) for beat in beats}
            best = max(living_engines(beats), key=lambda beat: num_claims[beat.engine_id], default=None)
            if best is not None and (num_claims[best.engine_id] or not any(num_claims.values())):
                return best
            assert time.monotonic() < give_up_at, "no living engine holds the requests"
            await asyncio.sleep(0.05)
    finally:
        await commands.close()
