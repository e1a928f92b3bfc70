"""The history of a model with several partitions, as one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..broker import RequestFilter, RequestHistory
from ..broker.series import SeriesPoint, SeriesStore, summed_points
from ..connection import CommandConnection
from ..keys import Keys
from ..queue.request_events import RequestEvent, RequestSummary
from ..queue.request_state import RequestState
from .layout import Layouts


async def open_history(connection: CommandConnection, keys: Keys, model: str) -> RequestHistory:
    """Return the history of a model's requests over its current partitions."""
    num = (await Layouts(connection, keys).read(model)).num_ever
    return RequestHistory(connection, keys.model(model)) if num == 1 else WholeHistory(connection, keys, model, num)


async def read_series(
    connection: CommandConnection, keys: Keys, model: str, *, hours: float, step_s: int | None = None
) -> list[SeriesPoint]:
    """Return the counts of a model over all partitions; as ``SeriesStore.read``."""
    num = (await Layouts(connection, keys).read(model)).num_ever
    stores = [SeriesStore(connection, keys.model(model, number)) for number in range(num)]
    return summed_points(await asyncio.gather(*(store.read(hours=hours, step_s=step_s) for store in stores)))


class WholeHistory(RequestHistory):
    """Several partitions as one. Events of different partitions are in order by the clocks of their servers alone, so
    who follows them may miss one of a server whose clock is behind."""

    def __init__(self, connection: CommandConnection, keys: Keys, model: str, num: int) -> None:
        super().__init__(connection, keys.model(model))
        self._parts = [RequestHistory(connection, keys.model(model, number)) for number in range(num)]

    @property
    def parts(self) -> Sequence[RequestHistory]:
        return self._parts

    async def events(self, *, after: str = "0-0", limit: int = 500) -> list[RequestEvent]:
        by_partition = await asyncio.gather(*(part.events(after=after, limit=limit) for part in self._parts))
        return sorted((event for events in by_partition for event in events), key=lambda event: event.place)[:limit]

    async def last_event_id(self) -> str:
        event_ids = await asyncio.gather(*(part.last_event_id() for part in self._parts))
        return max(event_ids, key=lambda event_id: tuple(map(int, event_id.split("-"))))

    async def history(self, request_id: str) -> list[RequestEvent]:
        histories = await asyncio.gather(*(part.history(request_id) for part in self._parts))
        return next((events for events in histories if events), [])

    async def find(self, request_id: str) -> RequestSummary | None:
        summaries = await asyncio.gather(*(part.find(request_id) for part in self._parts))
        return next((request for request in summaries if request is not None), None)

    async def requests(self, selection: RequestFilter = RequestFilter(), *, limit: int = 100) -> list[RequestSummary]:  # noqa: B008  # frozen
        lists = await asyncio.gather(*(part.requests(selection, limit=limit) for part in self._parts))
        every = [request for requests in lists for request in requests]
        moved = [request for request in every if request.state is not RequestState.QUEUED]
        moved.sort(key=lambda request: -request.at)
        return [*moved, *(request for request in every if request.state is RequestState.QUEUED)][:limit]
