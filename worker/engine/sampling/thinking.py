"""thinking_token_budget: the end of thinking is forced on a request that has thought for so many tokens.

Thinking lasts from one token, ``<think>`` or what the model has in its place, to another. The prompt may begin it
(chat templates do): then its last start counts, and the tokens behind that. A second start inside changes nothing, so a
model cannot begin its count anew.
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
    """Rows of a step that get one certain token.

    Args:
        rows, token_ids: ``[F]``.
    """

    rows: NDArray[np.int64]
    token_ids: NDArray[np.int64]

    def apply(self, logits: Tensor) -> Tensor:
        """Leave those rows of ``logits``, ``[R, V]``, nothing else; in place."""
        rows, token_ids = (torch.from_numpy(array).to(logits.device) for array in (self.rows, self.token_ids))
        logits[rows] = float("-inf")
        logits[rows, token_ids] = 0.0
        return logits


class ThinkingTable(RowStates["_Thinking"]):
    """Those rows of the batch whose requests have a budget, kept from step to step."""

    def set_row(self, row: int, request: Request) -> None:
        """Begin to count for ``request`` in ``row``, if it has a budget."""
        if request.params.is_thinking_limited and request.params.think_token_ids is not None:
            self._rows[row] = _Thinking(request)

    def take(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> ForcedTokens | None:
        """The rows among ``rows``, ``[R]``, whose thinking ends now; None if there is none."""
        forced = [(index, thinking.end) for index, thinking in self._among(rows) if thinking.is_exhausted]
        if not forced:
            return None
        return ForcedTokens(*np.array(forced, np.int64).T.copy())


class _Thinking:
    """Where one request stands; ``_num_tokens`` is how many it has thought, None outside of thinking."""

    def __init__(self, request: Request) -> None:
        budget, token_ids = request.params.thinking_token_budget, request.params.think_token_ids
        assert budget is not None
        assert token_ids is not None
        self._budget = budget
        self._start, self.end = token_ids
        self._num_tokens = num_thought(request.prompt_token_ids, *token_ids)
        # Behind the thinking before a grammar, all is the grammar's: marks in its strings are text.
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
