"""Bookkeeping of the records of a request that were delivered, and of the unseen part of a new record.

Redis may lose the last records that it had sent, or all of them. The generation is then resumed at an earlier token and
cut into other records. The text at a token may differ in length, too, because an incomplete character is held back and
the number of tokens per step varies. So tokens are counted by index, and text by the number of characters before a
record, which is known only after reading the log up to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...shared.errors import OutputChangedError
from ...shared.messages.deltas import Delta
from ...shared.values.shown import shown


class TakenRecords:
    """Combines records of the channel and of the log into one sequence without gap or repeat.

    Attributes:
        next_index: index of the next token to deliver.
        ended: whether the end was delivered.
        num_records: number of known records, from the first of the log on.
    """

    def __init__(self, request_id: str) -> None:
        self.next_index = 0
        self.ended = False
        self.num_records = 0
        self._request_id = request_id
        self._token_ids: list[int] = []
        self._num_segments = 0
        self._num_chars = 0
        # Number of characters of the known records; begin, end and number of characters of the last one, None if the
        # log was rewritten.
        self._num_log_chars = 0
        self._last: tuple[int, int, int] | None = (0, 0, 0)

    @property
    def first_read(self) -> int:
        """Position at which to read the log: at the last known record, to check that it still exists."""
        return max(self.num_records - 1, 0)

    def has_end_of(self, delta: Delta) -> bool:
        """Return whether ``delta`` has the end of a segment that is known to have ended."""
        return bool(delta.segment_ends) and delta.segment_ends[-1].number < self._num_segments

    def take_next(self, delta: Delta) -> Delta | None:
        """Take ``delta`` if it is the next record of the log. Returns its unseen part; None if it is not the next.

        A client computes this for each record that it receives. It costs little unless the log was lost once.
        """
        last, index = self._last, self.next_index
        if delta.index != index or last is None or last[1] != index:
            return None
        if self._num_chars != self._num_log_chars or delta.segment_ends:
            unseen = self._unseen_part(delta, self._num_log_chars)
            self._know(self.num_records + 1, delta, self._num_log_chars + len(delta.text))
            return unseen
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
        """Return whether ``delta``, which is not the next record, has unseen content, so that the log must be read.

        Raises:
            OutputChangedError: a delivered token came again with another id.
        """
        self._compare(delta)
        return delta.finished or delta.index == self.next_index or delta.next_index > self.next_index

    def take_log(self, records: Sequence[Delta]) -> list[Delta] | None:
        """Take ``records``, which were read from ``first_read`` on, and return their unseen parts.

        Returns None if the last known record is not in its place: Redis has lost it, and the whole log must be read.

        Raises:
            OutputChangedError: as ``is_beyond``.
        """
        unseen, num_records, num_chars = [], self.num_records, self._num_log_chars
        if num_records:
            if not records or _ends_of(records[0]) != self._last:
                self.num_records, self._num_log_chars, self._last = 0, 0, None
                return None
            records = records[1:]
        for delta in records:
            if self._is_new(delta, num_chars):
                unseen.append(self._unseen_part(delta, num_chars))
            num_chars += len(delta.text)
        if records:
            self._know(num_records + len(records), records[-1], num_chars)
        return unseen

    def _know(self, num_records: int, last: Delta, num_chars: int) -> None:
        self.num_records, self._last, self._num_log_chars = num_records, _ends_of(last), num_chars

    def _is_new(self, delta: Delta, num_chars_before: int) -> bool:
        self._compare(delta)
        if self.ended or delta.index > self.next_index:
            return False
        has_new_text = num_chars_before + len(delta.text) > self._num_chars
        has_new_end = bool(delta.segment_ends) and not self.has_end_of(delta)
        return delta.finished or delta.next_index > self.next_index or has_new_text or has_new_end

    def _unseen_part(self, delta: Delta, num_chars_before: int) -> Delta:
        """Count ``delta`` and return its unseen part."""
        num_seen_tokens, num_seen_chars = self.next_index - delta.index, max(0, self._num_chars - num_chars_before)
        self._num_chars = max(self._num_chars, num_chars_before + len(delta.text))
        self._token_ids += delta.token_ids[num_seen_tokens:]
        self.next_index = max(self.next_index, delta.next_index)
        self.ended = delta.finished
        if delta.segment_ends:
            self._num_segments = delta.segment_ends[-1].number + 1
        if num_seen_chars:
            text_ends = [max(0, end - num_seen_chars) for end in delta.text_ends]
            delta = msgspec.structs.replace(delta, text=delta.text[num_seen_chars:], text_ends=text_ends)
        if not num_seen_tokens:
            return delta
        return msgspec.structs.replace(
            delta,
            index=delta.index + num_seen_tokens,
            token_ids=delta.token_ids[num_seen_tokens:],
            logprobs=delta.logprobs[num_seen_tokens:],
            prompt_logprobs=[],
            first_prompt_token=None,
            text_ends=delta.text_ends[num_seen_tokens:],
        )

    def _compare(self, delta: Delta) -> None:
        delivered = self._token_ids[delta.index : delta.next_index]
        if delivered == delta.token_ids[: len(delivered)]:
            return
        place = next(i for i, (old, new) in enumerate(zip(delivered, delta.token_ids, strict=False)) if old != new)
        raise OutputChangedError(
            f"request {shown(self._request_id)}: Redis lost a part of the output, and token {delta.index + place} came "
            f"again as {delta.token_ids[place]} where it had been {delivered[place]}; send the request again"
        )


def _ends_of(delta: Delta) -> tuple[int, int, int]:
    return delta.index, delta.next_index, len(delta.text)
