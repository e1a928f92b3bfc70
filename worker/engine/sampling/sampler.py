"""Sampling parameters of the running requests as arrays, and the choice of the next tokens from logits.

Changes for single requests are applied first, in vLLM's order: rules about tokens (``token_rules.py``), the operator's
processors, penalties, a forced end of thinking (all three in ``row_changes.py``), grammars
(``structured/table.py``). Temperature and filters follow, also in vLLM's order. A row draws from the remaining tokens
with one uniform number of its seed and position (``kernels/sampling``).

The random numbers of requests depend on seed and position alone. So a request draws the same numbers in any batch, and
an engine that resumes it continues the same stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels import sampling
from ....kernels.sampling import DTYPES
from ..scheduling.request import Request
from ..structured.table import GrammarTable
from .logprobs import NO_LOGPROBS
from .row_changes import PenaltyTable, ProcessorTable, ThinkingTable
from .token_rules import TokenRuleTable

# A division by less would overflow; vLLM has the same limit.
GREEDY_TEMPERATURE = 1e-5
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class LogitsChange(Protocol):
    """A change to the logits of one step."""

    def apply(self, logits: Tensor) -> Tensor:
        """Change ``logits``, ``[R, V]`` of any float dtype, each row independently; in place if possible."""
        ...


class ChangeTable(Protocol):
    """Changes of one kind by row of the batch; empty while no request needs them."""

    def set_row(self, row: int, request: Request) -> None: ...

    def forget_row(self, row: int) -> None: ...

    def append_tokens(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None: ...

    def reads_tokens(self, rows: NDArray[np.int64]) -> bool:
        """Return whether the changes of ``rows`` depend on tokens that were sampled before."""
        ...

    def select(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> LogitsChange | None: ...


@dataclass
class SamplingRows:
    """Sampling parameters of the ``R`` requests that get a token.

    Args:
        parameters: those of ``kernels.sampling.Draws`` by name, ``[R]`` each, except ``uniforms``, which seeds and
            positions determine. The temperature of greedy rows is 0.
        seeds: ``[R]``.
        positions: ``[R]``, index of the new token among the output tokens.
        changes: changes to the logits, in the order in which they are applied before all else.
        num_logprobs: ``[R]``, number of alternatives in each row's log probabilities, or ``NO_LOGPROBS``; None if no
            row requests any.
    """

    parameters: dict[str, NDArray[Any]]
    seeds: NDArray[np.uint64]
    positions: NDArray[np.int64]
    changes: list[LogitsChange] = field(default_factory=list)
    num_logprobs: NDArray[np.int64] | None = None

    def select(self, rows: NDArray[np.int64]) -> SamplingRows:
        """Select some rows, without ``changes``, which have been applied before, and without ``num_logprobs``."""
        parameters = {name: column[rows] for name, column in self.parameters.items()}
        return SamplingRows(parameters, self.seeds[rows], self.positions[rows])


class SamplingTable:
    """Sampling parameters by row of the batch, kept between steps."""

    def __init__(self, num_rows: int) -> None:
        self._num_prompt_tokens = np.zeros(num_rows, np.int64)
        self._rows = SamplingRows(
            parameters={
                name: torch.zeros(num_rows, dtype=dtype).numpy() for name, dtype in DTYPES.items() if name != "uniforms"
            },
            seeds=np.zeros(num_rows, np.uint64),
            positions=np.zeros(num_rows, np.int64),
        )
        self._num_logprobs = np.full(num_rows, NO_LOGPROBS)
        # Result of the last step: the batch passes the same array again while its requests are the same.
        self._last_rows: NDArray[np.int64] | None = None
        self._last_constants = self._rows
        # In the order in which they are applied.
        self._changes: tuple[ChangeTable, ...] = (
            TokenRuleTable(),
            ProcessorTable(),
            PenaltyTable(),
            ThinkingTable(),
            GrammarTable(),
        )

    def set_row(self, row: int, request: Request) -> None:
        """Write the parameters of ``request`` into ``row``."""
        self.forget_row(row)
        self._last_rows = None
        params = request.params
        self._num_prompt_tokens[row] = request.num_prompt_tokens
        for name, column in self._rows.parameters.items():
            column[row] = getattr(params, name)
        if params.temperature < GREEDY_TEMPERATURE:
            self._rows.parameters["temperature"][row] = 0.0
        self._rows.seeds[row] = request.seed
        self._num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        for table in self._changes:
            table.set_row(row, request)

    def forget_row(self, row: int) -> None:
        """Drop the state of ``row`` in all tables, after its request has left."""
        for table in self._changes:
            table.forget_row(row)

    def append_tokens(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Record the new tokens of ``rows``, both ``[R]``."""
        for table in self._changes:
            table.append_tokens(rows, token_ids)

    def select(self, rows: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> SamplingRows:
        """Return the parameters of ``rows``; their requests have ``num_tokens`` tokens; both ``[R]``."""
        if rows is not self._last_rows:
            self._last_rows, self._last_constants = rows, self._constants(rows)
        positions = num_tokens - self._num_prompt_tokens[rows]
        changes = [change for table in self._changes if (change := table.select(rows, positions)) is not None]
        return replace(self._last_constants, positions=positions, changes=changes)

    def gives_tokens_alone(self, rows: NDArray[np.int64]) -> bool:
        """Return whether ``rows``, ``[R]``, get a token from their logits, without earlier tokens, and nothing else."""
        has_logprobs = self._num_logprobs[rows].max(initial=NO_LOGPROBS) != NO_LOGPROBS
        return not has_logprobs and not any(table.reads_tokens(rows) for table in self._changes)

    def _constants(self, rows: NDArray[np.int64]) -> SamplingRows:
        """Return the parameters that do not change while the requests of ``rows`` are the same."""
        constants = self._rows.select(rows)
        num_logprobs = self._num_logprobs[rows]
        if num_logprobs.max(initial=NO_LOGPROBS) != NO_LOGPROBS:
            constants.num_logprobs = num_logprobs
        return constants


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) for each pair of a seed and an output position, all ``[R]``."""
    streams = _mix(seeds + _GOLDEN)
    bits = _mix(streams + positions.astype(np.uint64) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of splitmix64 (Steele et al. 2014): every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def samples_rows_independently(logits: Tensor, rows: SamplingRows) -> bool:
    """Return whether ``sample`` processes each row independently, so that its bits depend on no other row."""
    is_plain = not rows.changes and rows.num_logprobs is None
    return is_plain and sampling.is_row_independent(logits, torch.from_numpy(rows.parameters["top_k"]))


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Return one token id per row, ``[R]`` int64. ``logits``, ``[R, V]`` of any float dtype, may be overwritten."""
    for change in rows.changes:
        logits = change.apply(logits)
    if not rows.parameters["temperature"].any():
        return sampling.argmax(logits)
    columns = rows.parameters | {"uniforms": uniforms(rows.seeds, rows.positions)}
    draws = sampling.Draws(**{name: torch.from_numpy(column) for name, column in columns.items()})
    return sampling.sample(logits, draws)
