"""Which adapter each token has, for layers that know nothing of a step but its rows."""

from __future__ import annotations

from torch import Tensor


class TokenAdapters:
    """Bound to a model: set before each forward, and asked by what adds the adapters to the outputs of its layers.

    Attributes:
        slots: ``[T]``, a slot for each row that layers compute now, negative for none; None if no row has one.
        is_used: something asks, so a forward that is recorded has to be recorded with adapters, too.
    """

    def __init__(self) -> None:
        self.slots: Tensor | None = None
        self.is_used = False

    def begin(self, token_lora: Tensor | None) -> None:
        """A forward of these tokens begins."""
        self.slots = token_lora

    def keep(self, rows: Tensor) -> None:
        """From now on layers compute these rows alone."""
        if self.slots is not None:
            self.slots = self.slots[rows]
