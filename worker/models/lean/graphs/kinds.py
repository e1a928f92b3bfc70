"""The graphs of decodes, and those of steps with prompts: which step fits which, and what it finds."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable

from torch import Tensor

from ...forward import ModelInput
from .buffers import DecodeBuffers, Places, PromptBuffers

# capture(step, out): records what writes the hidden rows of ``step`` into ``out``; returns what does it again.
Capture = Callable[[ModelInput, Tensor], Callable[[], None]]


class DecodeGraphs:
    """Of steps whose rows all have one token.

    Args:
        sizes: numbers of rows, ascending.
    """

    def __init__(self, sizes: tuple[int, ...], places: Places, capture: Capture) -> None:
        self._sizes = sizes
        self._buffers = DecodeBuffers(sizes[-1], places)
        self._replays = {
            (size, has_adapters): capture(
                self._buffers.input_of(size, has_adapters=has_adapters), self._buffers.hidden[:size]
            )
            for size, has_adapters in itertools.product(reversed(sizes), places.has_adapters)
        }

    def __len__(self) -> int:
        return len(self._replays)

    def replay(self, step: ModelInput) -> Tensor | None:
        """What logits of ``step`` are made of, ``[R, hidden size]``, until the next replay; None if no graph fits."""
        num_rows = len(step.batch.query_lens)
        place = bisect_left(self._sizes, num_rows)
        if place == len(self._sizes) or step.batch.num_decodes < num_rows:
            return None
        size = self._sizes[place]
        self._buffers.fill(step, size)
        self._replays[size, step.token_lora is not None]()
        is_whole = len(step.logit_rows) == num_rows
        return self._buffers.hidden[:num_rows] if is_whole else self._buffers.hidden[step.logit_rows]


class PromptGraphs:
    """Of steps in which some rows have several tokens, which see no further than themselves.

    Args:
        token_sizes, row_sizes: numbers of tokens and of rows, ascending; each is captured with each.
    """

    def __init__(
        self, token_sizes: tuple[int, ...], row_sizes: tuple[int, ...], places: Places, capture: Capture
    ) -> None:
        self._token_sizes, self._row_sizes = token_sizes, row_sizes
        self._buffers = PromptBuffers(token_sizes[-1], row_sizes[-1], places)
        self._replays = {
            (num_tokens, num_rows, has_adapters): capture(
                self._buffers.input_of(num_tokens, num_rows, has_adapters=has_adapters),
                self._buffers.hidden[:num_rows],
            )
            for num_tokens, num_rows, has_adapters in itertools.product(
                reversed(token_sizes), reversed(row_sizes), places.has_adapters
            )
        }

    def __len__(self) -> int:
        return len(self._replays)

    def replay(self, step: ModelInput) -> Tensor | None:
        """As of ``DecodeGraphs``."""
        num_logits = len(step.logit_rows)
        tokens = bisect_left(self._token_sizes, len(step.token_ids))
        rows = bisect_left(self._row_sizes, max(len(step.batch.query_lens), num_logits))
        is_too_large = tokens == len(self._token_sizes) or rows == len(self._row_sizes)
        if is_too_large or step.batch.visible_ends is not None:
            return None
        size = self._token_sizes[tokens]
        self._buffers.fill(step, size)
        self._replays[size, self._row_sizes[rows], step.token_lora is not None]()
        return self._buffers.hidden[:num_logits]
