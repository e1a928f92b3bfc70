"""Sampling parameters of the running requests as arrays."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..scheduling.request import Request
from ..structured.table import GrammarTable
from .given_axes import GivenAxesTable
from .given_embeds import GivenEmbedsTable
from .penalties import PenaltyTable
from .processed_rows import ProcessorTable
from .prompt_rows import PromptRowTable
from .thinking import ThinkingTable
from .token_rules import TokenRuleTable
from .visible_ends import VisibleEndsTable

# Below it a division would overflow; vLLM draws the same line.
GREEDY_TEMPERATURE = 1e-5
NO_LOGPROBS = -1


class LogitsChange(Protocol):
    """What requests want changed in the logits of one step."""

    def apply(self, logits: Tensor) -> Tensor:
        """Change ``logits``, ``[R, V]`` of any float dtype, each row by itself; in place if it can be done so."""
        ...


class ChangeTable(Protocol):
    """One kind of change, for those rows of the batch whose requests want it; empty while none does."""

    def set_row(self, row: int, request: Request) -> None: ...

    def forget_row(self, row: int) -> None: ...

    def append_tokens(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None: ...

    def take(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> LogitsChange | None: ...


@dataclass
class SamplingRows:
    """What the sampler needs to know of the ``R`` requests that get a token.

    Args:
        temperature: ``[R]``, 0 for a row that takes its most probable token.
        top_k, top_p, min_p: ``[R]``; a ``top_k`` of 0 keeps all.
        seeds: ``[R]``.
        positions: ``[R]``, place of the new token among the output tokens.
        changes: to the logits, in this order, before anything else.
        num_logprobs: ``[R]``, how many alternatives each row's log probabilities shall have, or ``NO_LOGPROBS``; None
            if no row asks.
    """

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seeds: NDArray[np.uint64]
    positions: NDArray[np.int64]
    changes: list[LogitsChange] = field(default_factory=list)
    num_logprobs: NDArray[np.int64] | None = None

    def take(self, rows: NDArray[np.int64]) -> SamplingRows:
        """The random part of some rows; ``changes`` have been applied before."""
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
        self._num_logprobs = np.full(num_rows, NO_LOGPROBS)
        # What the last step took: the batch gives the same array again while its requests are the same.
        self._taken_rows: NDArray[np.int64] | None = None
        self._taken = self._rows
        # In the order in which they are applied.
        self._changes: tuple[ChangeTable, ...] = (
            TokenRuleTable(),
            ProcessorTable(),
            PenaltyTable(),
            ThinkingTable(),
            GrammarTable(),
        )
        self.prompt_rows = PromptRowTable()
        self.given_embeds = GivenEmbedsTable()
        self.given_axes = GivenAxesTable()
        self.visible_ends = VisibleEndsTable()

    def set_row(self, row: int, request: Request) -> None:
        """Write the parameters of ``request`` into ``row``."""
        self.forget_row(row)
        self._taken_rows = None
        params = request.params
        self._num_prompt_tokens[row] = request.num_prompt_tokens
        is_greedy = params.temperature < GREEDY_TEMPERATURE
        self._rows.temperature[row] = 0.0 if is_greedy else params.temperature
        self._rows.top_k[row] = max(params.top_k, 0)
        self._rows.top_p[row] = params.top_p
        self._rows.min_p[row] = params.min_p
        self._rows.seeds[row] = request.seed
        self._num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        for table in self._changes:
            table.set_row(row, request)
        self.prompt_rows.set_row(row, request)
        self.given_embeds.set_row(row, request)
        self.given_axes.set_row(row, request)
        self.visible_ends.set_row(row, request)

    def forget_row(self, row: int) -> None:
        """Drop what ``row`` has beyond its numbers; its request has left."""
        for table in self._changes:
            table.forget_row(row)
        self.prompt_rows.forget_row(row)
        self.given_embeds.forget_row(row)
        self.given_axes.forget_row(row)
        self.visible_ends.forget_row(row)

    def append_tokens(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Note the new tokens of ``rows``, both ``[R]``."""
        for table in self._changes:
            table.append_tokens(rows, token_ids)

    def take(self, rows: NDArray[np.int64], num_tokens: NDArray[np.int64]) -> SamplingRows:
        """The parameters of ``rows``, whose requests have ``num_tokens`` tokens, both ``[R]``."""
        if rows is not self._taken_rows:
            self._taken_rows, self._taken = rows, self._constants(rows)
        positions = num_tokens - self._num_prompt_tokens[rows]
        changes = [change for table in self._changes if (change := table.take(rows, positions)) is not None]
        return replace(self._taken, positions=positions, changes=changes)

    def _constants(self, rows: NDArray[np.int64]) -> SamplingRows:
        """What stays as it is while the requests of ``rows`` are the same."""
        taken = self._rows.take(rows)
        num_logprobs = self._num_logprobs[rows]
        if num_logprobs.max(initial=NO_LOGPROBS) != NO_LOGPROBS:
            taken.num_logprobs = num_logprobs
        return taken
