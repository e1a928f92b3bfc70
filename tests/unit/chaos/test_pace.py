"""Things happen after some tokens, and not at all while there are none."""

from __future__ import annotations

import asyncio
from random import Random

from penstock.ops.lab.chaos.pace import EveryFewTokens


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_it_waits_for_as_many_tokens_as_were_drawn() -> None:
    pace, seed = EveryFewTokens(100), 3
    drawn, random = Random(seed), Random(seed)
    for _ in range(5):
        num_tokens = int(drawn.expovariate(1 / 100))
        # Events during the last action do not count.
        pace.saw(1000)
        waiting = asyncio.create_task(pace.wait(random))
        await turn()
        for _ in range(num_tokens):
            pace.saw(1)
        await turn()
        assert not waiting.done()
        pace.saw(1)
        await waiting
