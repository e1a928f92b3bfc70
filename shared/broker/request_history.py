"""The history of requests, and lists of them: without a SCAN, and without a subscription.

One list is of requests whose readers have not read the log to its end.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar

import msgspec

from ..connection import CommandConnection
from ..errors import ValidationError
from ..keys import ModelKeys
from ..queue.lifecycle import RequestEvent, RequestState, RequestSummary, decode_entry, decode_event, summary_of
from ..values.names import check_name
from ..values.shown import shown
from .script import repairing, run_script

T = TypeVar("T")
PAGE = 500
MAX_LISTED = 10_000
# Words for sets of states, in addition to the names of the states.
_WORDS = {
    "waiting": frozenset({RequestState.QUEUED}),
    "running": frozenset({RequestState.CLAIMED}),
    "ended": frozenset(state for state in RequestState if state.is_end),
    **{state.value: frozenset({state}) for state in RequestState},
}
STATE_WORDS = tuple(_WORDS)
_IN_REDIS = frozenset({RequestState.QUEUED, RequestState.CLAIMED})
_EVENT_ID = re.compile(rb"\d+-\d+")


class RequestFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects requests; an empty field selects all.

    Args:
        states: any of ``STATE_WORDS``: "waiting", "running", "ended", or names of states.
        id_prefix: prefix of their ids.
        since: Unix time in seconds; selects requests whose last known move was not before.
        until: likewise, whose last known move was not after; 0 for no limit.
    """

    states: tuple[str, ...] = ()
    tenant: str = ""
    band: str = ""
    engine_id: str = ""
    id_prefix: str = ""
    since: float = 0.0
    until: float = 0.0

    def __post_init__(self) -> None:
        for word in self.states:
            if word not in _WORDS:
                raise ValidationError(f"states must be of {', '.join(STATE_WORDS)}, got {shown(word)}")

    @property
    def selected(self) -> frozenset[RequestState]:
        """The selected states."""
        return frozenset().union(*(_WORDS[word] for word in self.states)) if self.states else frozenset(RequestState)

    def selects(self, request: RequestSummary) -> bool:
        """Whether the filter selects a request."""
        return (
            request.state in self.selected
            and self.tenant in ("", request.tenant)
            and self.band in ("", request.band)
            and self.engine_id in ("", request.engine_id)
            and request.request_id.startswith(self.id_prefix)
            and self.since <= request.at <= (self.until or math.inf)
        )


class RequestHistory:
    """All methods raise ``RedisUnavailableError`` when Redis is unavailable for longer than the connection retries."""

    def __init__(self, connection: CommandConnection, keys: ModelKeys) -> None:
        self.connection = connection
        self.keys = keys

    @property
    def parts(self) -> Sequence[RequestHistory]:
        """Histories of all partitions of the model."""
        return [self]

    async def events(self, *, after: str = "0-0", limit: int = PAGE) -> list[RequestEvent]:
        """Return up to ``limit`` events after one, the oldest first, for callers that follow them."""
        if not _EVENT_ID.fullmatch(after.encode(errors="replace")):
            raise ValidationError(f"after must be the id of an event, such as 0-0, got {shown(after)}")
        entries = await self._read_repaired("XRANGE", self.keys.events, f"({after}", "+", "COUNT", limit)
        return _without_none(decode_entry(entry) for entry in entries)

    async def last_event_id(self) -> str:
        """Return the id of the newest event, from which on ``events`` goes; "0-0" without any."""
        entries = await self._newest("+", 1)
        return entries[0][0].decode() if entries else "0-0"

    async def history(self, request_id: str) -> list[RequestEvent]:
        """Return what a request has lived through, the oldest first; [] if nothing is known of it.

        After its result has expired, what of it the model still keeps.
        """
        flat = await self._read_repaired("HGETALL", self.keys.request(check_name("request_id", request_id)))
        record = dict(zip(flat[::2], flat[1::2], strict=True))
        tenant, band = (record.get(name, b"").decode(errors="replace") for name in (b"tenant", b"band"))
        events = _without_none(
            decode_event(field.decode(), value, request_id=request_id, tenant=tenant, band=band)
            for field, value in record.items()
            if _EVENT_ID.fullmatch(field)
        )
        if not record:
            events = [event async for event in self._newest_first() if event.request_id == request_id]
        return sorted(events, key=lambda event: event.place)

    async def find(self, request_id: str) -> RequestSummary | None:
        """Return the summary of one request, also after its result has expired; None without one."""
        events = await self.history(request_id)
        if events and events[-1].state.is_end:
            return summary_of(events[-1])
        rows = await self._listed_rows("these", 1, RequestFilter(), request_id)
        return rows[0] if rows else summary_of(events[-1]) if events else None

    async def requests(self, selection: RequestFilter = RequestFilter(), *, limit: int = 100) -> list[RequestSummary]:  # noqa: B008  # frozen
        """Return requests, the last moved first, and then the waiting ones in the order of their lines.

        Ended requests, and those that await input, are listed as long as the model retains their last event, also after
        their results have expired. Waiting and running requests are always listed.

        Raises:
            ValidationError: ``limit`` is out of range.
        """
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LISTED:
            raise ValidationError(f"limit must be an integer in [1, {MAX_LISTED}], got {shown(limit)}")
        states = selection.selected
        running = await self._listed_rows("running", limit, selection) if RequestState.CLAIMED in states else []
        waiting = await self._listed_rows("waiting", limit, selection) if RequestState.QUEUED in states else []
        live = [request for request in (*running, *waiting) if selection.selects(request)]
        others = (
            await self._others(selection, limit, {request.request_id for request in live}) if states - _IN_REDIS else []
        )
        moved = [request for request in (*others, *live) if request.state is not RequestState.QUEUED]
        moved.sort(key=lambda request: -request.at)
        return [*moved, *(request for request in live if request.state is RequestState.QUEUED)][:limit]

    async def _others(self, selection: RequestFilter, limit: int, listed: set[str]) -> list[RequestSummary]:
        """Return ended requests and those that await input, by their last event. The records of others have more."""
        requests: list[RequestSummary] = []
        # Also events after ``until``: the last one of a request decides.
        async for event in self._newest_first():
            if event.at < selection.since or len(requests) == limit:
                break
            if event.request_id not in listed:
                listed.add(event.request_id)
                request = summary_of(event)
                if request.state not in _IN_REDIS and selection.selects(request):
                    requests.append(request)
        return requests

    async def _newest_first(self) -> AsyncIterator[RequestEvent]:
        last = "+"
        while entries := await self._newest(last, PAGE):
            for event in _without_none(decode_entry(entry) for entry in entries):
                yield event
            last = f"({entries[-1][0].decode()}"

    async def _newest(self, last: str, count: int) -> Any:
        """Return entries up to ``last``, the newest first."""

        def read() -> Awaitable[Any]:
            return self.connection.execute("XREVRANGE", self.keys.events, last, "-", "COUNT", count)

        return await repairing(self.connection, self.keys, read)

    async def _listed_rows(self, which: str, limit: int, selection: RequestFilter, *ids: str) -> list[RequestSummary]:
        filters = (selection.tenant, selection.band, selection.engine_id, selection.id_prefix)
        args = [which, min(limit, MAX_LISTED), *filters, *ids]
        rows = await run_script(self.connection, self.keys, "requests", [self.keys.leases], args)
        return _without_none(_summary(row) for row in rows)

    async def _read_repaired(self, *command: Any) -> Any:
        return await repairing(self.connection, self.keys, lambda: self.connection.execute(*command))


def _without_none(items: Iterable[T | None]) -> list[T]:
    return [item for item in items if item is not None]


def _summary(row: list[bytes | None]) -> RequestSummary | None:
    """Return a request by its record; None if it is damaged."""
    words = [None if value is None else value.decode(errors="replace") for value in row]
    request_id, state, tenant, band, count, attempts, engine, arrived, charged, entry, prompt, most, epoch = words
    try:
        arrived_at = float(arrived or (entry or "0").partition("-")[0]) / 1000
        started_at = float(charged) / 1000 if charged else None
        request_state = RequestState(state or "")
        # An epoch is the clock of its claim.
        claimed_at = int(epoch or 0) / 1_000_000 if request_state is RequestState.CLAIMED else 0.0
        return RequestSummary(
            request_id=request_id or "",
            state=request_state,
            tenant=tenant or "",
            band=band or "",
            at=max(claimed_at, arrived_at),
            arrived_at=arrived_at,
            started_at=started_at,
            engine_id=engine or "",
            num_output_tokens=int(count or 0),
            num_prompt_tokens=int(prompt or 0),
            max_tokens=int(most or 0),
            num_attempts=int(attempts or 0),
        )
    except ValueError:
        return None


async def find_unread(connection: CommandConnection, keys: ModelKeys, known: Sequence[tuple[str, int]]) -> list[int]:
    """Return the positions in ``known`` of requests that are unknown, or have another number of records.

    Args:
        known: ids of requests of one partition, and how many records of their logs the reader has.
    """
    return await run_script(connection, keys, "unread", [keys.leases], [*chain(*known)])
