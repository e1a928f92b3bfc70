"""Logits processors written by the operator, for the rows of the batch with requests that chose some."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..logits_processors import LogitsProcessor, ProcessorFailedError
from ..scheduling.request import Request
from .row_states import RowStates


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
            _check(processor.name, logits, processor.request.vocab_size)
            logits = logits.float()
        return logits

    @staticmethod
    def _call(name: str, function, *args):  # untyped, since it is the operator's function
        try:
            return function(*args)
        except BaseException as error:  # the operator's code may raise anything
            raise ProcessorFailedError(f"logits processor {name!r} raised {type(error).__name__}: {error}") from error


def _check(name: str, logits: object, vocab_size: int) -> None:
    if not isinstance(logits, Tensor) or logits.ndim != 1 or len(logits) < vocab_size:
        result = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ProcessorFailedError(f"logits processor {name!r} must return one logit for each token, got {result}")
    highest = torch.max(logits)
    if not torch.isfinite(highest):  # NaN if any logit is NaN
        raise ProcessorFailedError(f"logits processor {name!r} left no token to choose: the highest logit is {highest}")
