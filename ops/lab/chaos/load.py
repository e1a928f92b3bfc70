"""Runs requests through clients and records the output that subscribers receive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from random import Random

from ....producer import Client, Delta, PenstockError, RequestHandle
from ....shared.errors import RedisFullError, RedisUnavailableError, RequestNotFoundError, UnknownModelError
from ....shared.process.log import get_logger
from .killed_reader import KilledReaders
from .workload import ChaosRequest

NUM_CLIENTS = 3
RECONNECT_PAUSE_S = 0.1
MAX_SENT_AGAIN = 3

Connect = Callable[[], Client]
# Called with a request, its id, and the delta that its subscriber has just received.
OnDelta = Callable[[ChaosRequest, str, Delta], None]

log = get_logger(__name__)


@dataclass
class Sighting:
    """Output that the subscriber of one request received, delta by delta."""

    request: ChaosRequest
    request_id: str
    indexes: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    error: str = ""
    # The stream ended with the error for a request that Redis has lost.
    is_gone: bool = False
    # That error came before anything else, so it was sent again under the same id, as the error invites to.
    num_sent_again: int = 0

    def saw(self, delta: Delta) -> None:
        self.indexes += range(delta.index, delta.next_index)
        self.token_ids += delta.token_ids
        self.text += delta.text
        if delta.finish_reason is not None:
            self.finish_reasons.append(delta.finish_reason.value)


@dataclass
class LoadResult:
    """All sightings of a run, and how long it took."""

    sightings: list[Sighting]
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(len(sighting.token_ids) for sighting in self.sightings) / self.wall_s


async def run_load(
    url: str,
    requests: list[ChaosRequest],
    *,
    label: str,
    concurrency: int,
    on_delta: OnDelta,
    go_on: Callable[[int], bool],
    patience_s: float,
    shards: Mapping[str, str] | None = None,
    readers: KilledReaders | None = None,
) -> LoadResult:
    """Run requests, in turn and again from the first, while ``go_on(number started)`` is true.

    Args:
        shards: servers of the models, if not ``url``.
        label: prefix of the request ids ``label-NUMBER``.
        concurrency: concurrent requests.
        patience_s: a request that has not ended this long after the last one started counts as lost. If nothing at all
            is received for this time, no more requests are started.
        readers: kills the first reader of some detached requests.
    """
    sightings: list[Sighting] = []
    started_at = time.monotonic()
    hangs = False
    async with AsyncExitStack() as stack:
        connect = partial(Client.connect, url, shards=shards or {})
        clients = [await stack.enter_async_context(connect()) for _ in range(NUM_CLIENTS)]

        async def work() -> None:
            while go_on(len(sightings)) and not hangs:
                number = len(sightings)
                sighting = Sighting(requests[number % len(requests)], f"{label}-{number}")
                sightings.append(sighting)
                await _run_one(connect, clients[number % NUM_CLIENTS], sighting, on_delta, readers)

        workers = [asyncio.create_task(work()) for _ in range(concurrency)]
        amount, grew_at = 0, started_at
        while go_on(len(sightings)) and not hangs and any(not worker.done() for worker in workers):
            await asyncio.wait(workers, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            before, amount = amount, _amount(sightings)
            grew_at = time.monotonic() if amount != before else grew_at
            hangs = time.monotonic() - grew_at > patience_s
        ended, hanging = await asyncio.wait(workers, timeout=0 if hangs else patience_s)
        wall_s = time.monotonic() - started_at
        for worker in hanging:
            worker.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        for worker in ended:
            worker.result()
    return LoadResult(sightings, wall_s)


def _amount(sightings: list[Sighting]) -> int:
    """Something that grows whenever anything is seen."""
    return sum(
        1 + len(sighting.indexes) + bool(sighting.error) + sighting.is_gone + sighting.num_sent_again
        for sighting in sightings
    )


async def _run_one(
    connect: Connect, client: Client, sighting: Sighting, on_delta: OnDelta, readers: KilledReaders | None
) -> None:
    """Run a request as an app does: after a temporary refusal it is sent again."""
    while True:
        try:
            await _try_one(connect, client, sighting, on_delta, readers)
            return
        except RedisFullError as error:
            if sighting.indexes:  # a request that has started is never refused
                sighting.error = f"{error.code}: {error}"
                return
            await asyncio.sleep(error.retry_after_s)
        except UnknownModelError as error:
            # Redis has just lost its data: the engines enter themselves again. A name that was wrong would never come.
            log.info("model_not_known_yet", error=str(error))
            if sighting.indexes:
                sighting.is_gone = True
                return
            await asyncio.sleep(RECONNECT_PAUSE_S)
        except RequestNotFoundError:
            if sighting.indexes or sighting.num_sent_again == MAX_SENT_AGAIN:
                sighting.is_gone = True
                return
            sighting.num_sent_again += 1
        except PenstockError as error:
            sighting.error = f"{error.code}: {error}"
            return


async def _try_one(
    connect: Connect, client: Client, sighting: Sighting, on_delta: OnDelta, readers: KilledReaders | None
) -> None:
    request = sighting.request
    if request.is_detached and request.loses_reader and readers is not None:
        deltas = _read_after_kill(connect, client, sighting, readers)
    elif request.is_detached:
        deltas = _read_in_pieces(connect, await _submit(client, sighting))
    else:
        deltas = client.stream(
            request.prompt,
            request.params,
            request_id=sighting.request_id,
            model=request.model,
            tenant=request.tenant,
            session_id=request.session_id,
        )
    async with aclosing(deltas):
        async for delta in deltas:
            on_delta(request, sighting.request_id, delta)
            sighting.saw(delta)


async def _submit(client: Client, sighting: Sighting) -> RequestHandle:
    request = sighting.request
    return await client.submit(
        request.prompt,
        request.params,
        request_id=sighting.request_id,
        model=request.model,
        tenant=request.tenant,
        session_id=request.session_id,
    )


async def _read_after_kill(
    connect: Connect, client: Client, sighting: Sighting, readers: KilledReaders
) -> AsyncGenerator[Delta]:
    """Follow a detached request with a process that is killed, and with readers that resume after its last token."""
    async with readers.started() as process:
        handle, after = await _submit(client, sighting), -1
        async with aclosing(readers.read(process, handle.request_id, handle.model)) as deltas:
            async for delta in deltas:
                after = delta.next_index - 1
                yield delta
                if delta.finished:
                    return
    async with aclosing(_read_in_pieces(connect, handle, after)) as deltas:
        async for delta in deltas:
            yield delta


async def _read_in_pieces(connect: Connect, handle: RequestHandle, after: int = -1) -> AsyncGenerator[Delta]:
    """Follow a detached request with readers that disconnect, and others that resume on new connections."""
    random = Random(handle.request_id)
    while True:
        pieces = random.randint(1, 20)
        async with await _connected(connect) as reader:
            stream = (await reader.handle(handle.request_id, model=handle.model)).stream(after=after)
            async with aclosing(stream):
                async for delta in stream:
                    after = delta.next_index - 1
                    yield delta
                    if delta.finished:
                        return
                    pieces -= 1
                    if not pieces:
                        break


async def _connected(connect: Connect) -> Client:
    """Connect as an app that starts while Redis may be unreachable: retry while the error suggests it."""
    while True:
        try:
            return await connect()
        except RedisUnavailableError:
            await asyncio.sleep(RECONNECT_PAUSE_S)
