"""Repetition, presence and frequency penalties.

They change only the logits of tokens that a request already has. So a row with a penalty stores its distinct tokens and
their counts. They are computed from prompt and output when its request enters the batch, and extended by each sampled
token. They depend on ``Request.token_ids`` alone, so preemption or resumption by another engine does not change a
penalty. (Counts over the vocabulary would take 155 MB at 256 rows of 152k.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.penalties import penalize
from ..scheduling.request import Request
from .row_states import RowStates


@dataclass
class Penalties:
    """The ``E`` logits of a step that are penalised.

    Args:
        rows, token_ids: ``[E]``, indices of the logits; no pair occurs twice.
        repetition: ``[E]``, divides positive logits and multiplies others.
        deduction: ``[E]``, is subtracted afterwards.
    """

    rows: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    repetition: NDArray[np.float32]
    deduction: NDArray[np.float32]

    def apply(self, logits: Tensor) -> Tensor:
        """Penalise ``logits``, ``[R, V]``, in place if they are float32. Each logit changes independently."""
        logits = logits.float()
        penalize(logits, *map(torch.from_numpy, (self.rows, self.token_ids, self.repetition, self.deduction)))
        return logits


class PenaltyTable(RowStates["_TokenCounts"]):
    """Token counts of the rows of the batch with a penalty, kept between steps."""

    def set_row(self, row: int, request: Request) -> None:
        """Count the tokens of ``request`` in ``row``, if it has a penalty."""
        params = request.params
        if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0):
            self._rows[row] = _TokenCounts(request)

    def select(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> Penalties | None:
        """Return the penalties of ``rows``, ``[R]``; None if no row has one."""
        penalised = self._among(rows)
        if not penalised:
            return None
        lengths = [counts.size for _, counts in penalised]
        return Penalties(
            rows=np.repeat([index for index, _ in penalised], lengths),
            token_ids=np.concatenate([counts.token_ids[: counts.size] for _, counts in penalised]),
            repetition=np.repeat([counts.repetition for _, counts in penalised], lengths).astype(np.float32),
            deduction=np.concatenate([counts.deduction() for _, counts in penalised]).astype(np.float32),
        )


class _TokenCounts:
    """The ``size`` distinct tokens of a request with penalties, and how often each was output."""

    def __init__(self, request: Request) -> None:
        params = request.params
        self.repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        output = np.array(request.token_ids[request.num_prompt_tokens :], np.int64)
        # Only the repetition penalty covers the prompt, and prompts are long.
        prompt = request.prompt_token_ids if self.repetition != 1.0 else []
        distinct = np.union1d(output, np.array(prompt, np.int64))
        self.size = len(distinct)
        num_remaining = request.max_output_tokens - len(output)
        self.token_ids = np.pad(distinct, (0, num_remaining))
        self._num_outputs = np.zeros(self.size + num_remaining, np.int64)
        np.add.at(self._num_outputs, np.searchsorted(distinct, output), 1)
        self._place_of = {token_id: place for place, token_id in enumerate(distinct.tolist())}

    def append(self, token_id: int) -> None:
        """Count an output token."""
        place = self._place_of.setdefault(token_id, self.size)
        if place == self.size:
            self.token_ids[place] = token_id
            self.size += 1
        self._num_outputs[place] += 1

    def deduction(self) -> NDArray[Any]:
        """Return the deductions, ``[size]``. Computed from the counts each time, because accumulated sums would round
        differently after a resumption.
        """
        num_outputs = self._num_outputs[: self.size]
        return self._presence * (num_outputs > 0) + self._frequency * num_outputs
