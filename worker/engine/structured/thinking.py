"""A grammar that applies after a model's thinking.

The output is either text of the grammar, or ``start``, any tokens, ``end`` and text of the grammar. If the prompt has
begun the thinking, it contains the ``start``. So a model may answer without thinking, and an output that ends with
"stop" follows the grammar.
"""

from __future__ import annotations

import enum

from ....shared.messages.outcome import RequestError
from ....shared.params.chat import num_thought
from ..scheduling.request import Request
from .constraint import GrammarConstraint
from .grammar import Bitmask, Grammar


class _Phase(enum.Enum):
    BEFORE = enum.auto()  # the first token decides whether the model thinks
    INSIDE = enum.auto()
    AFTER = enum.auto()


class Thinking:
    """The state of an output with respect to thinking.

    Args:
        start, end: tokens that enclose the thinking.
        prompt: may already have begun the thinking.
    """

    def __init__(self, start: int, end: int, prompt: list[int]) -> None:
        self.start, self.end = start, end
        self._phase = _Phase.BEFORE if num_thought(prompt, start, end) is None else _Phase.INSIDE

    @property
    def may_begin(self) -> bool:
        return self._phase is _Phase.BEFORE

    @property
    def is_inside(self) -> bool:
        return self._phase is _Phase.INSIDE

    def takes(self, token_id: int) -> bool:
        """Advance by a token; return whether it belongs to the thinking, including its marks, and not to the answer."""
        if self._phase is _Phase.AFTER:
            return False
        if self._phase is _Phase.BEFORE:
            self._phase = _Phase.INSIDE if token_id == self.start else _Phase.AFTER
            return self._phase is _Phase.INSIDE
        if token_id == self.end:
            self._phase = _Phase.AFTER
        return True


def thinking_of(request: Request) -> Thinking | None:
    """Return the state of an empty output; None if the grammar applies from the first token."""
    grammar, marks = request.params.structured_outputs, request.params.think_token_ids
    if grammar is None or grammar.enable_in_reasoning is not False or marks is None:
        return None
    return Thinking(*marks, request.prompt_token_ids)


class LaterConstraint(GrammarConstraint):
    """The constraint of a grammar that applies after the thinking.

    Args:
        thinking: has already advanced by the tokens of the output.
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
        """Write the allowed next tokens: inside the thinking, all except the tokens that end the output."""
        if self._thinking.is_inside and self.failure is None:
            bitmask[row] = -1
            for token_id in self.ending_token_ids:
                if token_id != self._thinking.end:
                    _set_bit(bitmask, row, token_id, is_allowed=False)
            return True
        is_filled = super().fill(bitmask, row)
        if is_filled and self._thinking.may_begin:
            _set_bit(bitmask, row, self._thinking.start, is_allowed=True)
        return is_filled

    def accept(self, token_id: int) -> RequestError | None:
        """Advance by a sampled token; the grammar does not get tokens of the thinking."""
        if self.failure is None and self._thinking.takes(token_id):
            return None
        return super().accept(token_id)


def _set_bit(bitmask: Bitmask, row: int, token_id: int, *, is_allowed: bool) -> None:
    """Set or clear a bit; the words are signed."""
    word, bit = divmod(token_id, 32)
    value = int(bitmask[row, word]) & 0xFFFFFFFF
    value = value | 1 << bit if is_allowed else value & ~(1 << bit)
    bitmask[row, word] = value - (1 << 32) if value >= 1 << 31 else value
