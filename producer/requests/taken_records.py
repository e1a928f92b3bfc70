"""What was taken of a request's log, and what a record has beyond it.

Redis may lose records that it had sent, or all of them. The generation then goes on from an earlier token, cut into
other records, and how far the text has come at a token may be another place, too: within a character nothing is told,
and how many tokens are read at once is chance. So tokens are counted by their indexes, and text by the characters
before a record, which only those know who have read the log up to there.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...shared.errors import OutputChangedError
from ...shared.messages.deltas import Delta
from ...shared.values.shown import shown


class TakenRecords:
    """Puts records of the channel, and of the log whenever it is read, into one row without gap or repeat.

    Attributes:
        next_index: index of the first token that was not taken yet.
        ended: whether the end was taken.
        num_records: of the log, from its first on, that are known.
    """

    def __init__(self, request_id: str) -> None:
        self.next_index = 0
        self.ended = False
        self.num_records = 0
        self._request_id = request_id
        self._token_ids: list[int] = []
        self._num_segments = 0
        self._num_chars = 0
        # Of the records that are known: how many characters, and begin, end and characters of the last one; None for
        # that where the log is another one than was known.
        self._num_log_chars = 0
        self._last: tuple[int, int, int] | None = (0, 0, 0)

    @property
    def first_read(self) -> int:
        """The record at which reading begins: the last one known is read again, to see whether it is still there."""
        return max(self.num_records - 1, 0)

    def has_end_of(self, delta: Delta) -> bool:
        """Whether it tells the end of a segment that is known to have ended."""
        return bool(delta.segment_ends) and delta.segment_ends[-1].number < self._num_segments

    def take_next(self, delta: Delta) -> Delta | None:
        """Take ``delta`` if it comes next in the log, of which all before it is known; returns what is to be told.

        What a client computes for each record that it is sent: next to nothing, unless the log was lost once.
        """
        last, index = self._last, self.next_index
        if delta.index != index or last is None or last[1] != index:
            return None
        if self._num_chars != self._num_log_chars or delta.segment_ends:
            told = self._told(delta, self._num_log_chars)
            self._know(self.num_records + 1, delta, self._num_log_chars + len(delta.text))
            return told
        self._token_ids += delta.token_ids
        self.next_index = next_index = len(self._token_ids)
        num_chars = len(delta.text)
        self._num_log_chars += num_chars
        self._num_chars = self._num_log_chars
        self._last = (index, next_index, num_chars)
        self.num_records += 1
        self.ended = delta.finish_reason is not None
        return delta

    def is_beyond(self, delta: Delta) -> bool:
        """Whether ``delta``, which does not come next, has something that was not taken, so that the log must be read.

        Raises:
            OutputChangedError: tokens that were taken have come again as others.
        """
        self._compare(delta)
        return delta.finished or delta.index == self.next_index or delta.next_index > self.next_index

    def take_log(self, records: Sequence[Delta]) -> list[Delta] | None:
        """Take what is new of ``records``, which were read from ``first_read`` on; returns what is to be told.

        None if the last known one is not in its place: Redis has lost it, and the log is to be read as a whole.

        Raises:
            OutputChangedError: as ``is_beyond``.
        """
        told, num_records, num_chars = [], self.num_records, self._num_log_chars
        if num_records:
            if not records or _ends_of(records[0]) != self._last:
                self.num_records, self._num_log_chars, self._last = 0, 0, None
                return None
            records = records[1:]
        for delta in records:
            if self._is_new(delta, num_chars):
                told.append(self._told(delta, num_chars))
            num_chars += len(delta.text)
        if records:
            self._know(num_records + len(records), records[-1], num_chars)
        return told

    def _know(self, num_records: int, last: Delta, num_chars: int) -> None:
        self.num_records, self._last, self._num_log_chars = num_records, _ends_of(last), num_chars

    def _is_new(self, delta: Delta, num_chars_before: int) -> bool:
        self._compare(delta)
        if self.ended or delta.index > self.next_index:
            return False
        has_new_text = num_chars_before + len(delta.text) > self._num_chars
        has_new_end = bool(delta.segment_ends) and not self.has_end_of(delta)
        return delta.finished or delta.next_index > self.next_index or has_new_text or has_new_end

    def _told(self, delta: Delta, num_chars_before: int) -> Delta:
        """Count ``delta``; returns the part of it that is new."""
        num_seen, num_told = self.next_index - delta.index, max(0, self._num_chars - num_chars_before)
        self._num_chars = max(self._num_chars, num_chars_before + len(delta.text))
        self._token_ids += delta.token_ids[num_seen:]
        self.next_index = max(self.next_index, delta.next_index)
        self.ended = delta.finished
        if delta.segment_ends:
            self._num_segments = delta.segment_ends[-1].number + 1
        if num_told:
            delta = msgspec.structs.replace(delta, text=delta.text[num_told:])
        if not num_seen:
            return delta
        return msgspec.structs.replace(
            delta,
            index=delta.index + num_seen,
            token_ids=delta.token_ids[num_seen:],
            logprobs=delta.logprobs[num_seen:],
            prompt_logprobs=[],
            first_prompt_token=None,
        )

    def _compare(self, delta: Delta) -> None:
        seen = self._token_ids[delta.index : delta.next_index]
        if seen == delta.token_ids[: len(seen)]:
            return
        place = next(i for i, (old, new) in enumerate(zip(seen, delta.token_ids, strict=False)) if old != new)
        raise OutputChangedError(
            f"request {shown(self._request_id)}: Redis lost a part of the output, and token {delta.index + place} came "
            f"again as {delta.token_ids[place]} where it had been {seen[place]}; send the request again"
        )


def _ends_of(delta: Delta) -> tuple[int, int, int]:
    return delta.index, delta.next_index, len(delta.text)
