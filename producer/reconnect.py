"""The position of a reader in a stream, as the id of an event, and how the reader resumes there in any process.

The id of a delta's event is the index of its last token, or ``end`` after the last delta. With ``n`` answers there is
one of these for each, separated by commas: ``17,end,-1``. A browser's ``EventSource`` sends the id of the last event
that it received as ``Last-Event-ID`` when it reconnects.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ..shared.errors import ValidationError
from ..shared.messages.deltas import Delta
from ..shared.values.shown import shown
from .client import Client

END = "end"
# Beyond any output: if the reader has the end of an answer, only that end is read again.
_PAST_ALL = 2**31 - 1
_INDEX = re.compile(r"-1|[0-9]{1,9}")


class StreamPosition:
    """The part of each of ``n`` answers that a reader has received."""

    __slots__ = ("_answers",)

    def __init__(self, n: int = 1) -> None:
        self._answers = AnswerPositions([0] * n, [False] * n)

    @classmethod
    def parse(cls, event_id: str | None, n: int = 1) -> StreamPosition:
        """Read the value of a ``Last-Event-ID`` header; without a value, the position is the beginning.

        Raises:
            ValidationError: the value is not the id of a stream of ``n`` answers.
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
        """Index of the last token received of each answer, in the form of ``RequestHandle.stream``."""
        answers = self._answers
        pairs = zip(answers.next_indexes, answers.ended, strict=True)
        return [_PAST_ALL if ended else index - 1 for index, ended in pairs]

    @property
    def ended(self) -> bool:
        """Whether the reader has everything: HTTP 204 tells a browser not to reconnect."""
        return all(self._answers.ended)

    def advance(self, delta: Delta) -> bool:
        """Record that the reader receives ``delta``. False if the reader already has the end of that answer."""
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
    """Iterate over the deltas of a request after ``position``, without repeats or gaps. Leaving cancels nothing.

    Args:
        linger_s: as in ``RequestOptions``, if the request was enqueued with it.

    Raises:
        RequestNotFoundError: the request is unknown, or its result has expired.
    """
    after = position.after
    handle = await client.handle(request_id, model=model, n=len(after))
    async with aclosing(handle.stream(after, linger_s=linger_s)) as deltas:
        async for delta in deltas:
            yield delta


class AnswerPositions:
    """The positions of one reader, by answer.

    Args:
        next_indexes: the index of the first token that the reader does not have.
        ended: whether the reader has the end.
    """

    def __init__(self, next_indexes: list[int], ended: list[bool]) -> None:
        self.next_indexes = next_indexes
        self.ended = ended

    def has(self, answer: int, delta: Delta) -> bool:
        """Return whether the reader already has ``delta``."""
        return self.ended[answer] or delta.index < self.next_indexes[answer]

    def advance(self, answer: int, delta: Delta) -> None:
        """Record that the reader receives ``delta``."""
        self.next_indexes[answer] = delta.next_index
        if delta.finished:
            self.ended[answer] = True
