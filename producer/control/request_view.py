"""The client's view of the requests of all clients, and changes to many of them in one call."""

from __future__ import annotations

from collections.abc import Iterable

from ...shared.broker import RequestFilter, RequestHistory
from ...shared.broker.bulk import count_matching
from ...shared.partitions import open_history
from ...shared.queue.lifecycle import RequestEvent, RequestSummary
from ..client_parts.core import ClientCore


class RequestView(ClientCore):
    """The part of the client that lists requests as operators see them: without prompts and outputs.

    All methods raise ``UnknownModelError`` if no worker has ever served ``model`` here.
    """

    async def requests(
        self, wanted: RequestFilter | None = None, *, model: str | None = None, limit: int = 100
    ) -> list[RequestSummary]:
        """Return the requests of a model that match ``wanted``, or all; see ``RequestHistory.requests``.

        Raises:
            ValidationError: ``limit`` is not in [1, 10000].
        """
        return await (await self._history(model)).requests(wanted or RequestFilter(), limit=limit)

    async def find_request(self, request_id: str, *, model: str | None = None) -> RequestSummary | None:
        """Return the summary of one request, also after its result has expired; None if the request is unknown."""
        return await (await self._history(model)).find(request_id)

    async def history(self, request_id: str, *, model: str | None = None) -> list[RequestEvent]:
        """Return the events of one request, the oldest first; [] if the request is unknown."""
        return await (await self._history(model)).history(request_id)

    async def request_events(
        self, *, after: str = "0-0", model: str | None = None, limit: int = 500
    ) -> list[RequestEvent]:
        """Return the events of all requests of a model after the event ``after``, the oldest first.

        Raises:
            ValidationError: ``after`` is not the id of an event.
        """
        return await (await self._history(model)).events(after=after, limit=limit)

    async def last_event_id(self, *, model: str | None = None) -> str:
        """Return the id of a model's newest event, to follow the events after it; "0-0" if the model has none."""
        return await (await self._history(model)).last_event_id()

    async def count_requests(self, wanted: RequestFilter, *, model: str | None = None) -> int:
        """Return how many requests ``cancel_requests`` would end now, counted up to 10,000."""
        return await count_matching(await self._history(model), wanted)

    async def cancel_requests(self, wanted: RequestFilter, *, model: str | None = None) -> int:
        """End the requests that match ``wanted`` and that wait, run or await input, and return their number."""
        return await self._operations.cancel_matching((await self._card(model)).model, wanted)

    async def replay_requests(self, request_ids: Iterable[str] | None = None, *, model: str | None = None) -> int:
        """Requeue parked requests, those of ``request_ids`` or all. Return the number of those that can run."""
        return await self._operations.replay_all_dead((await self._card(model)).model, request_ids)

    async def _history(self, model: str | None) -> RequestHistory:
        return await open_history(self._commands, self._keys, (await self._card(model)).model)
