"""Changes to the logits of single rows: penalties, the thinking budget, and the operator's logits processors.

Penalties change only the logits of tokens that a request already has. So a row with a penalty stores its distinct
tokens and their counts. They are computed from prompt and output when its request enters the batch, and extended by
each sampled token. They depend on ``Request.token_ids`` alone, so preemption or resumption by another engine does not
change a penalty. (Counts over the vocabulary would take 155 MB at 256 rows of 152k.)

``thinking_token_budget`` forces the end of thinking after this many tokens. Thinking lasts from one token, ``<think>``
or the model's equivalent, to another. The prompt may begin it (chat templates do): then the tokens after its last start
count. A second start during thinking changes nothing, so a model cannot restart its count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.penalties import penalize
from ....shared.params.chat import num_thought
from ..logits_processors import LogitsProcessor, ProcessorFailedError
from ..scheduling.request import Request


class RowState(Protocol):
    """State of one request."""

    def append(self, token_id: int) -> None:
        """Record the next output token."""
        ...


State = TypeVar("State", bound=RowState)


class RowStates(Generic[State]):
    """States by row. Usually empty and without cost, since few requests need one."""

    def __init__(self) -> None:
        self._rows: dict[int, State] = {}

    def forget_row(self, row: int) -> None:
        """Drop the state of ``row``, if it has one."""
        self._rows.pop(row, None)

    def append_tokens(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Record the next output token of each row, both ``[R]``."""
        if self._rows:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                if row in self._rows:
                    self._rows[row].append(token_id)

    def reads_tokens(self, rows: NDArray[np.int64]) -> bool:
        """Return whether one of ``rows``, ``[R]``, has a state, which its tokens change."""
        return bool(self._among(rows))

    def _among(self, rows: NDArray[np.int64]) -> list[tuple[int, State]]:
        """Return the states of ``rows``, ``[R]``, each with its index; rows without a state are left out."""
        if not self._rows:
            return []
        return [(index, self._rows[row]) for index, row in enumerate(rows.tolist()) if row in self._rows]


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


@dataclass
class ProcessedRows:
    """Rows of a step with logits processors: index of each row among the logits, and its processors."""

    rows: list[tuple[int, _RequestProcessors]]

    def apply(self, logits: Tensor) -> Tensor:
        """Change those rows of ``logits``, ``[R, V]``, each independently; return all rows in float32.

        Raises:
            ProcessorFailedError: a processor raised, or left no token that can be sampled.
        """
        logits = logits.float()
        for row, processors in self.rows:
            logits[row] = processors.apply(logits[row].clone())
        return logits


class ProcessorTable(RowStates["_RequestProcessors"]):
    """Logits processors by row, created after the request enters its row."""

    def set_row(self, row: int, request: Request) -> None:
        """Store the processors of ``request`` and its output tokens, if it has processors."""
        if request.processors:
            self._rows[row] = _RequestProcessors(request)

    def select(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> ProcessedRows | None:
        """Return the processors of ``rows``, ``[R]``; None if no row has any."""
        processed = self._among(rows)
        return ProcessedRows(processed) if processed else None


class _RequestProcessors:
    """Processors of one request. If one cannot be created, its request's next step fails, and no other request."""

    def __init__(self, request: Request) -> None:
        self._factories = request.processors
        self._processors: list[LogitsProcessor] | None = None
        self._output_token_ids = request.token_ids[request.num_prompt_tokens :]

    def append(self, token_id: int) -> None:
        """Record the next output token."""
        self._output_token_ids.append(token_id)

    def apply(self, logits: Tensor) -> Tensor:
        """Apply all processors to ``logits``, ``[V]``; return the result."""
        if self._processors is None:
            self._processors = [self._call(factory.name, factory.make) for factory in self._factories]
        output_token_ids = tuple(self._output_token_ids)
        for processor in self._processors:
            logits = self._call(processor.name, processor.apply, output_token_ids, logits)
            _check_processed(processor.name, logits, processor.request.vocab_size)
            logits = logits.float()
        return logits

    @staticmethod
    def _call(name: str, function, *args):  # untyped, since it is the operator's function
        try:
            return function(*args)
        except BaseException as error:  # the operator's code may raise anything
            raise ProcessorFailedError(f"logits processor {name!r} raised {type(error).__name__}: {error}") from error


def _check_processed(name: str, logits: object, vocab_size: int) -> None:
    if not isinstance(logits, Tensor) or logits.ndim != 1 or len(logits) < vocab_size:
        result = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ProcessorFailedError(f"logits processor {name!r} must return one logit for each token, got {result}")
    highest = torch.max(logits)
    if not torch.isfinite(highest):  # NaN if any logit is NaN
        raise ProcessorFailedError(f"logits processor {name!r} left no token to choose: the highest logit is {highest}")
