"""The adapter of each token, for layers that know only the rows of a step."""

from __future__ import annotations

from torch import Tensor


class TokenAdapters:
    """Set before each forward of a model, and read by the hooks that add adapters to the outputs of its layers.

    Attributes:
        slots: ``[T]``, the slot of each row that layers compute now, negative for none; None if no row has one.
        is_used: some hook reads it, so a forward that is captured must also be captured with adapters.
    """

    def __init__(self) -> None:
        self.slots: Tensor | None = None
        self.is_used = False

    def begin(self, token_lora: Tensor | None) -> None:
        """Begin a forward of these tokens."""
        self.slots = token_lora

    def keep(self, rows: Tensor) -> None:
        """Restrict the rows to ``rows``, which are the only ones that layers compute from now on."""
        if self.slots is not None:
            self.slots = self.slots[rows]
