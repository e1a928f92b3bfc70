"""thinking_token_budget: forces the end of thinking after this many tokens.

Thinking lasts from one token, ``<think>`` or the model's equivalent, to another. The prompt may begin it (chat
templates do): then the tokens after its last start count. A second start during thinking changes nothing, so a model
cannot restart its count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....shared.params.reasoning import num_thought
from ..scheduling.request import Request
from .row_states import RowStates


@dataclass
class ForcedTokens:
    """Rows of a step with a forced token.

    Args:
        rows, token_ids: ``[F]``.
    """

    rows: NDArray[np.int64]
    token_ids: NDArray[np.int64]

    def apply(self, logits: Tensor) -> Tensor:
        """Leave only the forced token in those rows of ``logits``, ``[R, V]``; in place."""
        rows, token_ids = (torch.from_numpy(array).to(logits.device) for array in (self.rows, self.token_ids))
        logits[rows] = float("-inf")
        logits[rows, token_ids] = 0.0
        return logits


class ThinkingTable(RowStates["_Thinking"]):
    """Rows of the batch with a thinking budget, kept between steps."""

    def set_row(self, row: int, request: Request) -> None:
        """Count the thinking tokens of ``request`` in ``row``, if it has a budget."""
        if request.params.is_thinking_limited and request.params.think_token_ids is not None:
            self._rows[row] = _Thinking(request)

    def select(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> ForcedTokens | None:
        """Return the rows among ``rows``, ``[R]``, with an exhausted budget; None if there are none."""
        forced = [(index, thinking.end) for index, thinking in self._among(rows) if thinking.is_exhausted]
        if not forced:
            return None
        return ForcedTokens(*np.array(forced, np.int64).T.copy())


class _Thinking:
    """State of one request; ``_num_tokens`` counts its thinking tokens, None outside of thinking."""

    def __init__(self, request: Request) -> None:
        budget, token_ids = request.params.thinking_token_budget, request.params.think_token_ids
        assert budget is not None
        assert token_ids is not None
        self._budget = budget
        self._start, self.end = token_ids
        self._num_tokens = num_thought(request.prompt_token_ids, *token_ids)
        # With a grammar, thinking ends before the grammar begins: later thinking tokens are text in its strings.
        self._is_single = request.params.structured_outputs is not None
        self._is_over = False
        for token_id in request.token_ids[request.num_prompt_tokens :]:
            self.append(token_id)

    @property
    def is_exhausted(self) -> bool:
        return self._num_tokens is not None and self._num_tokens >= self._budget

    def append(self, token_id: int) -> None:
        """Count an output token."""
        if self._is_over:
            return
        if self._is_single and self._num_tokens is None and token_id != self._start:
            self._is_over = True
        elif token_id == self.end:
            self._num_tokens = None
            self._is_over = self._is_single
        elif self._num_tokens is not None:
            self._num_tokens += 1
        elif token_id == self._start:
            self._num_tokens = 0
