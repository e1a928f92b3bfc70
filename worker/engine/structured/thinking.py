"""A grammar that holds behind a model's thinking.

The output is ``grammar`` or ``start``, any tokens, ``end``, ``grammar``; where the prompt has begun the thinking, the
``start`` is there. So a model that does not think answers at once, and what ends with "stop" follows the grammar.
"""

from __future__ import annotations

import enum

from ....shared.messages.outcome import RequestError
from ....shared.params.reasoning import num_thought
from ..scheduling.request import Request
from .constraint import GrammarConstraint
from .grammar import Bitmask, Grammar


class _Place(enum.Enum):
    BEFORE = enum.auto()  # the first token says whether the model thinks
    INSIDE = enum.auto()
    BEHIND = enum.auto()


class Thinking:
    """Where an output stands.

    Args:
        start, end: tokens around thinking.
        prompt: may have begun it.
    """

    def __init__(self, start: int, end: int, prompt: list[int]) -> None:
        self.start, self.end = start, end
        self._place = _Place.BEFORE if num_thought(prompt, start, end) is None else _Place.INSIDE

    @property
    def may_begin(self) -> bool:
        return self._place is _Place.BEFORE

    @property
    def is_inside(self) -> bool:
        return self._place is _Place.INSIDE

    def takes(self, token_id: int) -> bool:
        """Whether the next token belongs to the thinking, with its marks, and not to the answer."""
        if self._place is _Place.BEHIND:
            return False
        if self._place is _Place.BEFORE:
            self._place = _Place.INSIDE if token_id == self.start else _Place.BEHIND
            return self._place is _Place.INSIDE
        if token_id == self.end:
            self._place = _Place.BEHIND
        return True


def thinking_of(request: Request) -> Thinking | None:
    """Where an output without tokens stands; None if the grammar holds from the first one on."""
    grammar, marks = request.params.structured_outputs, request.params.think_token_ids
    if grammar is None or grammar.enable_in_reasoning is not False or marks is None:
        return None
    return Thinking(*marks, request.prompt_token_ids)


class LaterConstraint(GrammarConstraint):
    """A grammar's constraint from the end of thinking on.

    Args:
        thinking: has taken the tokens that the output has already.
    """

    def __init__(
        self,
        request_id: str,
        grammar: Grammar,
        vocab_size: int,
        ending_token_ids: frozenset[int],
        thinking: Thinking,
    ) -> None:
        super().__init__(request_id, grammar, vocab_size, ending_token_ids)
        self._thinking = thinking

    def fill(self, bitmask: Bitmask, row: int) -> bool:
        """As that of the class. Thinking may be anything but the end of the output."""
        if self._thinking.is_inside and self.failure is None:
            bitmask[row] = -1
            for token_id in self.ending_token_ids:
                if token_id != self._thinking.end:
                    _set(bitmask, row, token_id, is_allowed=False)
            return True
        is_filled = super().fill(bitmask, row)
        if is_filled and self._thinking.may_begin:
            _set(bitmask, row, self._thinking.start, is_allowed=True)
        return is_filled

    def accept(self, token_id: int) -> RequestError | None:
        """As that of the class; tokens of the thinking do not come to the grammar."""
        if self.failure is None and self._thinking.takes(token_id):
            return None
        return super().accept(token_id)


def _set(bitmask: Bitmask, row: int, token_id: int, *, is_allowed: bool) -> None:
    """Set or clear a bit; the words are signed."""
    word, bit = divmod(token_id, 32)
    value = int(bitmask[row, word]) & 0xFFFFFFFF
    value = value | 1 << bit if is_allowed else value & ~(1 << bit)
    bitmask[row, word] = value - (1 << 32) if value >= 1 << 31 else value
