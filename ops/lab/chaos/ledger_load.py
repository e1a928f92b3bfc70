"""Requests that end in every way besides the usual one, for the comparison of the ledger with the records.

Nothing is expected of their outputs: they are left, cancelled, expired, or lose their client, while processes die.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from random import Random

import msgspec

from ....producer import Client, Delta, SamplingParams
from ....producer.batches import BatchStore, run_batch
from ....producer.inputs.options import RequestOptions
from ....shared.errors import PenstockError
from .load import Connect

NUM_AT_ONCE = 3
NUM_ROWS = 6
# After a refusal, since Redis may be away.
PAUSE_S = 0.2
PROMPTS = ("count from two to nine:", " spell 407:", " four plus two is", "count from four to nine:")


class LedgerLoad:
    """Runs one kind of request after the other until cancelled. ``ends`` counts them by kind and outcome.

    Args:
        connect: opens a client.
        url, folder: of the batches.
        models: asked in turn.
    """

    def __init__(self, connect: Connect, url: str, folder: Path, models: list[str], seed: int) -> None:
        self._connect = connect
        self._store = BatchStore(url, folder)
        self._models = itertools.cycle(models)
        self._random = Random(seed)
        self._numbers = itertools.count()
        self._kinds: dict[str, Callable[[Client], Awaitable[object]]] = {
            "left": self._leave,
            "cancelled": self._cancel,
            "expired": self._expire,
            "n": self._ask_for_several,
            "conversation": self._converse,
            "client lost": self._lose_client,
            "batch": self._run_batch,
        }
        self.ends: Counter[str] = Counter()

    async def run_while(self, should_continue: Callable[[], bool]) -> None:
        """Run requests of all kinds while ``should_continue`` is true."""
        async with self._store:
            await asyncio.gather(*(self._work(should_continue) for _ in range(NUM_AT_ONCE)))

    async def _work(self, should_continue: Callable[[], bool]) -> None:
        while should_continue():
            name = self._random.choice(list(self._kinds))
            try:
                async with self._connect() as client:
                    await self._kinds[name](client)
                outcome = "done"
            except PenstockError as error:
                outcome = error.code
                await asyncio.sleep(PAUSE_S)
            self.ends[f"{name}: {outcome}"] += 1

    def _options(self) -> RequestOptions:
        number = next(self._numbers)
        return RequestOptions(
            model=next(self._models),
            request_id=f"ledger-{number}",
            tenant=f"ledger{number % 2}",
            key_name=("", "web", "app")[number % 3],
        )

    def _params(self, *, n: int = 1, max_tokens: int = 48) -> SamplingParams:
        seed = self._random.getrandbits(40)
        return SamplingParams(n=n, temperature=1.0, seed=seed, max_tokens=max_tokens, ignore_eos=True)

    async def _leave(self, client: Client) -> None:
        deltas = client.stream(self._random.choice(PROMPTS), self._params(), **self._options())
        await _read_some(deltas, self._random.randrange(8))

    async def _cancel(self, client: Client) -> None:
        handle = await client.submit(self._random.choice(PROMPTS), self._params(n=2), **self._options())
        await _read_some(handle.stream(), self._random.randrange(12))
        await handle.cancel()

    async def _expire(self, client: Client) -> None:
        options = self._options()
        options["timeout_s"] = self._random.uniform(0.001, 0.3)
        await client.generate(self._random.choice(PROMPTS), self._params(), **options)

    async def _ask_for_several(self, client: Client) -> None:
        await client.generate(self._random.choice(PROMPTS), self._params(n=3, max_tokens=16), **self._options())

    async def _converse(self, client: Client) -> None:
        """Send two or three chunks, and sometimes leave before the last answer has ended."""
        num_chunks = self._random.randint(2, 3)
        num_answers = self._random.randint(num_chunks - 1, num_chunks)
        async with client.converse(self._params(max_tokens=12), **self._options()) as conversation:
            for number in range(num_chunks):
                await conversation.send(PROMPTS[number])
                if number < num_answers:
                    async for _ in conversation.segment():
                        pass
            if num_answers == num_chunks:
                await conversation.close_input()
                async for _ in conversation:
                    pass

    async def _lose_client(self, client: Client) -> None:
        """Close the client while its request runs, so that nobody cancels it before its lease expires."""
        deltas = client.stream(self._random.choice(PROMPTS), self._params(), **self._options())
        async for _ in deltas:
            await client.close()
            break
        await deltas.aclose()

    async def _run_batch(self, client: Client) -> None:
        model, tenant = next(self._models), "ledger0"
        file = await self._store.files.create(self._rows(model), filename="in.jsonl", tenant=tenant)
        batch = await self._store.create(
            input_file_id=file.id, endpoint="/v1/completions", tenant=tenant, key_name="web", is_private=True
        )
        run = partial(run_batch, client, self._store, batch.id)
        ended = await run(slice_s=0.2)
        while not ended.status.is_end:
            ended = await run()

    async def _rows(self, model: str) -> AsyncIterator[bytes]:
        for number in range(NUM_ROWS):
            body = {"model": model, "prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": 12, "n": 1 + number % 2}
            row = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
            yield msgspec.json.encode(row) + b"\n"


async def _read_some(deltas: AsyncGenerator[Delta], number: int) -> None:
    """Read up to this many deltas, then close the stream."""
    async with aclosing(deltas):
        async for _ in deltas:
            if number == 0:
                return
            number -= 1
