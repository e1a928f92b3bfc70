"""One request as its pages show it: input and parameters, log, and timeline.

Reading a log does not keep an abandoned request alive. A timeline says where the request waited, which engines it ran
on, and why each span ended.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from ...shared.broker import Broker
from ...shared.errors import PenstockError
from ...shared.messages.deltas import Delta
from ...shared.messages.requests import EngineCoreRequest
from ...shared.queue.lifecycle import WAITING_FOR_WAKE, EventKind, RequestEvent, RequestState
from ..words import event_words
from .access import Access

_decoder = msgspec.msgpack.Decoder(EngineCoreRequest)
# Parameters that hold text of users.
_CONTENT_FIELDS = ("stop", "bad_words", "structured_outputs", "extra_args")
MAX_SHOWN_CHARS = 20_000
# Of a total width of 100, so that spans without duration are visible.
LEAST_WIDTH = 0.6
_SPAN_WORDS = {
    RequestState.QUEUED: "waits",
    RequestState.CLAIMED: "runs",
    RequestState.AWAITING_INPUT: "waits for input",
}


class RequestInput(msgspec.Struct, frozen=True):
    """Parameters that are not at their defaults, and the prompt; "" if the operator may not see it."""

    tenant: str
    band: str
    form: str
    parameters: dict[str, str]
    prompt: str


def decode_request_input(payload: bytes, access: Access) -> RequestInput | None:
    """Return the input of an encoded request; None if ``payload`` is not a request."""
    try:
        request = _decoder.decode(payload)
    except (msgspec.MsgspecError, PenstockError, UnicodeDecodeError):
        return None
    parameters = _parameters(request)
    if not access.sees_contents:
        parameters = {name: "hidden" if name in _CONTENT_FIELDS else value for name, value in parameters.items()}
    prompt = _prompt(request) if access.sees_contents else ""
    return RequestInput(request.tenant, request.band, _form(request), parameters, prompt)


def _parameters(request: EngineCoreRequest) -> dict[str, str]:
    params: Any = request.sampling_params or request.pooling_params
    if params is None:
        return {}
    defaults = type(params)()
    names = [name for name in params.__struct_fields__ if getattr(params, name) != getattr(defaults, name)]
    return {name: repr(getattr(params, name)) for name in names}


def _form(request: EngineCoreRequest) -> str:
    if request.prompt_embeds is not None:
        return f"{request.num_prompt_tokens} embeddings"
    if request.prompt_token_ids is not None:
        return f"{len(request.prompt_token_ids)} token ids"
    if request.messages is not None:
        return f"{len(request.messages)} messages"
    return f"{len(request.prompt or '')} characters"


def _prompt(request: EngineCoreRequest) -> str:
    if request.messages is not None:
        return msgspec.json.format(msgspec.json.encode(request.messages)).decode()
    if request.prompt is not None:
        return request.prompt
    return " ".join(map(str, request.prompt_token_ids or ()))


class ReadLog:
    """The log of one request, as far as it has been read.

    Each read starts at the last known record. If that record is different or missing, the request was replayed under
    the same id, or Redis lost the end of the log. Then the log is read from its start.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._num_records = 0
        self._last: Delta | None = None
        self._whole: Delta | None = None
        # The watcher and a page may read at the same time.
        self._lock = asyncio.Lock()

    async def read_new(self, request_id: str) -> Delta | None:
        """Return all deltas so far, merged into one; None before the first.

        Raises:
            DamagedRecordError: a foreign writer has written to the log.
        """
        async with self._lock:
            records = await self._broker.read_log(request_id, max(0, self._num_records - 1))
            if self._last is not None and records[:1] == [self._last]:
                records = records[1:]
            elif self._num_records:
                self._num_records, self._last, self._whole = 0, None, None
                records = await self._broker.read_log(request_id)
            for record in records:
                if self._whole is None:
                    self._whole = record
                else:
                    self._whole.extend(record)
                self._last = record
            self._num_records += len(records)
            return self._whole


def spans_of(events: Sequence[RequestEvent], now: float) -> list[dict[str, Any]]:
    """Return a row for each span between two events. The last span lasts until ``now`` unless the request has ended.

    ``first_token`` is the number of tokens before the span, ``tokens`` the number that it added. ``then`` is the event
    that ended the span, ``why`` its cause; "" if unknown. ``ended_at`` is None for the current span.
    """
    ends: list[RequestEvent | None] = [*events[1:], None]
    return [
        _span(event, end, now)
        for event, end in zip(events, ends, strict=True)
        if end is not None or not event.state.is_end
    ]


def _span(event: RequestEvent, end: RequestEvent | None, now: float) -> dict[str, Any]:
    ended_at = None if end is None else end.at
    return {
        "what": _what(event),
        "engine": event.engine_id if event.kind is EventKind.CLAIMED else "",
        "epoch": event.epoch if event.kind is EventKind.CLAIMED else None,
        "began_at": event.at,
        "ended_at": ended_at,
        "took_s": max(0.0, (now if ended_at is None else ended_at) - event.at),
        "first_token": event.num_output_tokens,
        "tokens": 0 if end is None else max(0, end.num_output_tokens - event.num_output_tokens),
        "then": "" if end is None else event_words(end.kind),
        "why": "" if end is None else end.cause,
    }


def _what(event: RequestEvent) -> str:
    if event.state is RequestState.QUEUED and event.cause == WAITING_FOR_WAKE:
        return "waits for its model"
    return _SPAN_WORDS.get(event.state, "rests")


def bars_of(spans: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return start and width of each span's bar, of a total width of 100."""
    if not spans:
        return []
    began_at = spans[0]["began_at"]
    whole_s = max(span["began_at"] - began_at + span["took_s"] for span in spans) or 1.0
    bars = []
    for span in spans:
        width = max(LEAST_WIDTH, 100 * span["took_s"] / whole_s)
        start = 100 * (span["began_at"] - began_at) / whole_s
        bars.append((round(min(start, 100 - width), 2), round(width, 2)))
    return bars


def handovers(spans: Sequence[dict[str, Any]]) -> int:
    """Return how often another engine, or a restarted one, resumed the request."""
    runs = [span for span in spans if span["engine"]]
    return sum(later["epoch"] != before["epoch"] for before, later in itertools.pairwise(runs))
