"""Sampling parameters of the running requests as arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .request import Request

# Below it a division would overflow; vLLM draws the same line.
GREEDY_TEMPERATURE = 1e-5


@dataclass
class SamplingRows:
    """What the sampler needs to know of the ``R`` requests that get a token.

    Args:
        temperature, top_k, top_p, min_p: ``[R]``; a ``top_k`` of 0 keeps all.
        seeds: ``[R]``.
        positions: ``[R]``, place of the new token among the output tokens.
        masked_ids: ``(row, ids)`` pairs: tokens that the row may not get yet.
    """

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seeds: NDArray[np.uint64]
    positions: NDArray[np.int64]
    masked_ids: list[tuple[int, list[int]]] = field(default_factory=list)

    @property
    def greedy(self) -> NDArray[np.bool_]:
        """``[R]``, whether the row takes its most probable token."""
        return self.temperature < GREEDY_TEMPERATURE

    def take(self, rows: NDArray[np.int64]) -> SamplingRows:
        """The random part of some rows; ``masked_ids`` has been applied before."""
        return SamplingRows(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seeds[rows],
            self.positions[rows],
        )


class SamplingTable:
    """Sampling parameters by row of the batch, kept from step to step."""

    def __init__(self, num_rows: int) -> None:
        self._num_prompt_tokens = np.zeros(num_rows, np.int64)
        self._rows = SamplingRows(
            temperature=np.zeros(num_rows, np.float32),
            top_k=np.zeros(num_rows, np.int64),
            top_p=np.ones(num_rows, np.float32),
            min_p=np.zeros(num_rows, np.float32),
            seeds=np.zeros(num_rows, np.uint64),
            positions=np.zeros(num_rows, np.int64),
        )
        # row -> (min_tokens, ids that may not come before); most requests have none.
        self._masked_ids: dict[int, tuple[int, list[int]]] = {}

    def set_row(self, row: int, request: Request) -> None:
        """Write the parameters of ``request`` into ``row``."""
        params = request.params
        self._num_prompt_tokens[row] = request.num_prompt_tokens
        self._rows.temperature[row] = params.temperature
        self._rows.top_k[row] = max(params.top_k, 0)
        self._rows.top_p[row] = params.top_p
        self._rows.min_p[row] = params.min_p
        self._rows.seeds[row] = request.seed
        self._masked_ids.pop(row, None)
        ending = request.eos_token_ids | request.stop_token_ids
        if params.min_tokens and ending:
            self._masked_ids[row] = (params.min_tokens, sorted(ending))

    def take(self, rows: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> SamplingRows:
        """The parameters of ``rows``, whose requests have ``num_tokens`` tokens, both ``[R]``."""
        taken = self._rows.take(rows)
        taken.positions = num_tokens - self._num_prompt_tokens[rows]
        if self._masked_ids:
            for index, row in enumerate(rows.tolist()):
                min_tokens, ids = self._masked_ids.get(row, (0, []))
                if taken.positions[index] < min_tokens:
                    taken.masked_ids.append((index, ids))
        return taken
