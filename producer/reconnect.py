"""Where a reader of a stream stands, as the id of an event, and how it goes on from there in any process.

The id of a delta's event is the index of its last token, or ``end`` after the last delta; with ``n`` answers there is
one of these for each, with commas: ``17,end,-1``. A browser's ``EventSource`` sends the id of the last event that it
has as ``Last-Event-ID`` when it comes back.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ..shared.errors import ValidationError
from ..shared.messages.deltas import Delta
from ..shared.values.shown import shown
from .client import Client
from .results.answer_positions import AnswerPositions

END = "end"
# Beyond any output: of an answer whose end the reader has, nothing but that end is asked for.
_PAST_ALL = 2**31 - 1
_INDEX = re.compile(r"-1|[0-9]{1,9}")


class StreamPosition:
    """What a reader has of each of ``n`` answers."""

    __slots__ = ("_answers",)

    def __init__(self, n: int = 1) -> None:
        self._answers = AnswerPositions([0] * n, [False] * n)

    @classmethod
    def parse(cls, event_id: str | None, n: int = 1) -> StreamPosition:
        """Read the value of a ``Last-Event-ID`` header; without one it is the beginning.

        Raises:
            ValidationError: it is no id of a stream of ``n`` answers.
        """
        position = cls(n)
        if not event_id:
            return position
        parts = event_id.split(",")
        if parts == [END]:
            parts = [END] * n
        if len(parts) != n or not all(part == END or _INDEX.fullmatch(part) for part in parts):
            raise ValidationError(
                f"Last-Event-ID must be the id of an event of this stream, {n} token "
                f"{'index' if n == 1 else 'indexes, with commas'} (or {END!r}), got {shown(event_id)}"
            )
        ended = [part == END for part in parts]
        position._answers = AnswerPositions([0 if part == END else int(part) + 1 for part in parts], ended)
        return position

    @property
    def after(self) -> list[int]:
        """For each answer the index of the last token that the reader has, as ``RequestHandle.stream`` takes it."""
        answers = self._answers
        pairs = zip(answers.next_indexes, answers.ended, strict=True)
        return [_PAST_ALL if ended else index - 1 for index, ended in pairs]

    @property
    def ended(self) -> bool:
        """Whether the reader has everything: HTTP 204 tells a browser not to come again."""
        return all(self._answers.ended)

    def advance(self, delta: Delta) -> bool:
        """Note that the reader gets ``delta``; False if it is of an answer whose end the reader has."""
        if self._answers.ended[delta.child]:
            return False
        self._answers.advance(delta.child, delta)
        return True

    def __str__(self) -> str:
        if self.ended:
            return END
        return ",".join(END if last == _PAST_ALL else str(last) for last in self.after)


async def reconnect(
    client: Client,
    request_id: str,
    position: StreamPosition,
    *,
    model: str | None = None,
    linger_s: float | None = None,
) -> AsyncGenerator[Delta]:
    """Iterate over what a request has after ``position``: nothing twice, nothing left out. Leaving cancels nothing.

    Args:
        linger_s: as in ``RequestOptions``, if the request was enqueued with it.

    Raises:
        RequestNotFoundError: the request is unknown, or its result has expired.
        ValidationError: the position is inside a delta.
    """
    after = position.after
    handle = await client.handle(request_id, model=model, n=len(after))
    async with aclosing(handle.stream(after, linger_s=linger_s)) as deltas:
        async for delta in deltas:
            yield delta
