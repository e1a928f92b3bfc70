"""A model's partitions for clients that enqueue requests and search for them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from ..broker import LEFT, RELAID, Broker, Entry
from ..connection import RETRY_FOR_S, CommandConnection
from ..errors import PenstockError, RedisUnavailableError
from ..keys import Keys
from ..queue.lifecycle import RequestState
from ..values.shown import shown
from .layout import Layout, Layouts, lay_out

LOOK_AGAIN_S = 0.1
MAX_REMEMBERED = 100_000


class PartitionedBroker:
    """Enqueues each request into its partition, and finds it there.

    The partition of a request follows from its tenant and the layout at that time. With only the id, all partitions are
    queried once. So callers may choose ids freely, and requests from before a change of the layout are found, too.

    All methods raise ``RedisUnavailableError`` when a required Redis stays unavailable.
    """

    def __init__(self, connection: CommandConnection, keys: Keys, model: str, layouts: Layouts) -> None:
        self._connection = connection
        self._keys = keys
        self._model = model
        self._layouts = layouts
        self._brokers = [Broker(connection, keys.model(model))]
        self._places: OrderedDict[str, int] = OrderedDict()
        # Tenants that have left the partition that they had before, in the layout of that version.
        self._left: set[tuple[int, str]] = set()

    async def expected(self, tenant: str, request_id: str, session_id: str = "") -> Broker:
        """Return the expected partition of a request, as far as this process knows."""
        layout = await self._layouts.get(self._model)
        return self._broker(self._partition(layout, tenant, session_id or request_id)[0])

    def where(self, request_id: str) -> Broker:
        """Return the partition of a request that this process has just enqueued."""
        return self._broker(self._places.get(request_id, 0))

    async def enqueue_many(self, entries: Sequence[Entry]) -> list[str | PenstockError]:
        """Enqueue as ``Broker.enqueue_many``; an error of one partition is returned as an answer, too."""
        layout = await self._layouts.get(self._model)
        answers: dict[int, str | PenstockError] = {}
        if not layout.version:
            answers.update(enumerate(await self._brokers[0].enqueue_many(entries)))
            if RELAID not in answers.values():
                return [*answers.values()]
        give_up_at = asyncio.get_running_loop().time() + RETRY_FOR_S
        waiting = [number for number in range(len(entries)) if answers.get(number, RELAID) == RELAID]
        while waiting:
            if RELAID in answers.values():
                layout = await self._newer(layout, give_up_at)
            answers.update(await self._enqueue(layout, {number: entries[number] for number in waiting}))
            waiting = [number for number in waiting if answers[number] in (RELAID, LEFT)]
        return [answers[number] for number in range(len(entries))]

    async def find(self, request_id: str) -> Broker:
        """Return the partition that has a request; the first, if none has."""
        layout = await self._layouts.recent(self._model)
        if layout.num_known == 1:
            return self._brokers[0]
        place = self._places.get(request_id)
        if place is None:
            place = await self._look_for(layout, request_id)
            if place is None:
                return self._brokers[0]
            self._note(request_id, place)
        return self._broker(place)

    async def cancel(self, request_id: str) -> RequestState | None:
        """Cancel as ``Broker.cancel``."""
        return await (await self.find(request_id)).cancel(request_id)

    async def retry(self, request_id: str) -> bool:
        """Retry as ``Broker.retry``."""
        return await (await self.find(request_id)).retry(request_id)

    async def count_known(self, request_ids: Sequence[str]) -> int:
        """Count as ``Broker.count_known``."""
        brokers = self.all((await self._layouts.recent(self._model)).num_known)
        return sum(await asyncio.gather(*(broker.count_known(request_ids) for broker in brokers)))

    def all(self, num: int) -> list[Broker]:
        """Return the first ``num`` partitions."""
        return [self._broker(number) for number in range(num)]

    def _broker(self, number: int) -> Broker:
        while number >= len(self._brokers):
            partition = len(self._brokers)
            self._brokers.append(Broker(self._connection, self._keys.model(self._model, partition), partition))
        return self._brokers[number]

    def _partition(self, layout: Layout, tenant: str, named: str) -> tuple[int, bool]:
        """Return where a request belongs, and whether the tenant has another partition unless it has to stay there."""
        former = layout.former_partition_of(tenant)
        if former is None or (layout.version, tenant) in self._left:
            return layout.partition_of(tenant, named), False
        return former, True

    async def _enqueue(self, layout: Layout, entries: dict[int, Entry]) -> dict[int, str | PenstockError]:
        """Enqueue by a layout, into all partitions side by side."""
        attached = await self._known_elsewhere(layout, [entry for entry in entries.values() if not entry.is_fresh])
        groups: dict[int, dict[int, Entry]] = {}
        for number, entry in entries.items():
            # Answers that are told of together are counted where they are.
            named = entry.webhook_of or entry.session_id or entry.request_id
            place, may_have_left = self._partition(layout, entry.tenant, named)
            place = attached.get(entry.request_id, place)
            laid_out = msgspec.structs.replace(entry, layout=layout.version, may_have_left=may_have_left)
            groups.setdefault(place, {})[number] = laid_out
        answers: dict[int, str | PenstockError] = {}

        async def enqueue(place: int, group: dict[int, Entry]) -> None:
            try:
                answers.update(zip(group, await self._broker(place).enqueue_many([*group.values()]), strict=True))
            except PenstockError as error:
                answers.update(dict.fromkeys(group, error))
            for number, entry in group.items():
                if answers[number] == LEFT:
                    self._left.add((layout.version, entry.tenant))
                elif answers[number] != RELAID:
                    self._note(entry.request_id, place)

        await asyncio.gather(*(enqueue(place, group) for place, group in groups.items()))
        return answers

    async def _known_elsewhere(self, layout: Layout, entries: Sequence[Entry]) -> dict[str, int]:
        """Return where those are that are known already: their enqueueing attaches there, wherever they belong."""
        ids = [entry.request_id for entry in entries]
        if not ids or layout.num_known == 1:
            return {}
        counts = await asyncio.gather(*(broker.count_known(ids) for broker in self.all(layout.num_known)))
        if not any(counts):
            return {}
        places = await asyncio.gather(*(self._look_for(layout, request_id) for request_id in ids))
        return {request_id: place for request_id, place in zip(ids, places, strict=True) if place is not None}

    async def _look_for(self, layout: Layout, request_id: str) -> int | None:
        """Query all at the same time; an unavailable Redis is awaited only if no other one has the request."""

        async def look(broker: Broker) -> int | None:
            return broker.partition if await broker.known(request_id) else None

        looks = [asyncio.create_task(look(broker)) for broker in self.all(layout.num_known)]
        errors: list[PenstockError] = []
        try:
            for answered in asyncio.as_completed(looks):
                try:
                    place = await answered
                except PenstockError as error:
                    errors.append(error)
                else:
                    if place is not None:
                        return place
        finally:
            for task in looks:
                task.cancel()
            await asyncio.gather(*looks, return_exceptions=True)
        if errors:
            raise errors[0]
        return None

    def _note(self, request_id: str, place: int) -> None:
        self._places[request_id] = place
        if len(self._places) > MAX_REMEMBERED:
            self._places.popitem(last=False)

    async def _newer(self, layout: Layout, give_up_at: float) -> Layout:
        """Return the layout by which to try again, which is home's.

        If it is the one that was tried, it is being changed; or a partition has lost its data, and is told.
        """
        newest = await self._layouts.read(self._model)
        if newest.version == layout.version:
            if asyncio.get_running_loop().time() > give_up_at:
                raise RedisUnavailableError(
                    f"the partitions of model {shown(self._model)} are being changed for {RETRY_FOR_S:g} s now, or "
                    "home has forgotten them; run 'penstock queue partitions' with their number again"
                )
            if newest.is_settled:
                await lay_out(self._connection, self._keys, self._model, newest)
            await asyncio.sleep(LOOK_AGAIN_S)
        return newest
