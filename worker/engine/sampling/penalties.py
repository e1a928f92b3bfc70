"""Repetition, presence and frequency penalties.

They change the logits of tokens that a request has had, and of no others. So a row with a penalty keeps its distinct
tokens and their counts, made from prompt and output when its request enters the batch, and one token longer with each
that is sampled. All of it follows from ``Request.token_ids``: a request that was preempted, or begun by another
engine, is penalised as if nothing had happened. (Counts over the vocabulary would take 155 MB at 256 rows of 152k.)
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
        rows, token_ids: ``[E]``, where they are among the logits; no pair comes twice.
        repetition: ``[E]``, positive logits are divided by it and others multiplied.
        deduction: ``[E]``, then taken off.
    """

    rows: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    repetition: NDArray[np.float32]
    deduction: NDArray[np.float32]

    def apply(self, logits: Tensor) -> Tensor:
        """Penalise ``logits``, ``[R, V]``: in place if they are float32. Each logit changes by itself."""
        logits = logits.float()
        penalize(logits, *map(torch.from_numpy, (self.rows, self.token_ids, self.repetition, self.deduction)))
        return logits


class PenaltyTable(RowStates["_TokenCounts"]):
    """The tokens of those rows of the batch whose requests have a penalty, kept from step to step."""

    def set_row(self, row: int, request: Request) -> None:
        """Begin to count for ``request`` in ``row``, if it has a penalty."""
        params = request.params
        if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0):
            self._rows[row] = _TokenCounts(request)

    def take(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> Penalties | None:
        """What to change in the logits of ``rows``, ``[R]``; None if no row has a penalty."""
        found = self._among(rows)
        if not found:
            return None
        lengths = [counts.size for _, counts in found]
        return Penalties(
            rows=np.repeat([index for index, _ in found], lengths),
            token_ids=np.concatenate([counts.token_ids[: counts.size] for _, counts in found]),
            repetition=np.repeat([counts.repetition for _, counts in found], lengths).astype(np.float32),
            deduction=np.concatenate([counts.deduction() for _, counts in found]).astype(np.float32),
        )


class _TokenCounts:
    """The ``size`` distinct tokens of a request that count for its penalties, and how often each was output."""

    def __init__(self, request: Request) -> None:
        params = request.params
        self.repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        output = np.array(request.token_ids[request.num_prompt_tokens :], np.int64)
        # Of the prompt only the repetition penalty takes notice, and prompts are long.
        prompt = request.prompt_token_ids if self.repetition != 1.0 else []
        distinct = np.union1d(output, np.array(prompt, np.int64))
        self.size = len(distinct)
        num_to_come = request.max_output_tokens - len(output)
        self.token_ids = np.pad(distinct, (0, num_to_come))
        self._num_outputs = np.zeros(self.size + num_to_come, np.int64)
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
        """``[size]``. From the counts each time: sums of the penalties would round by how they came about."""
        num_outputs = self._num_outputs[: self.size]
        return self._presence * (num_outputs > 0) + self._frequency * num_outputs
