"""Logits processors of an operator's own, for those rows of the batch whose requests have chosen some."""

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
    """Rows of a step whose logits go through processors: ``rows[i]`` is a row of the logits."""

    rows: list[tuple[int, _Processed]]

    def apply(self, logits: Tensor) -> Tensor:
        """Change those rows of ``logits``, ``[R, V]``, each by itself, in float32 as all of them then are.

        Raises:
            ProcessorFailedError: a processor raised, or left nothing that can be sampled from.
        """
        logits = logits.float()
        for row, processed in self.rows:
            logits[row] = processed.apply(logits[row].clone())
        return logits


class ProcessorTable(RowStates["_Processed"]):
    """The processors of those rows whose requests have any, made when the request comes into its row."""

    def set_row(self, row: int, request: Request) -> None:
        """Make the processors of ``request``, if it has any, with all tokens it has."""
        if request.processors:
            self._rows[row] = _Processed(request)

    def take(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> ProcessedRows | None:
        """Those of ``rows``, ``[R]``, that are processed; None if none is."""
        found = self._among(rows)
        return ProcessedRows(found) if found else None


class _Processed:
    """The processors of one request. Those that cannot be made fail its next step, and no other request."""

    def __init__(self, request: Request) -> None:
        self._wanted = request.processors
        self._made: list[LogitsProcessor] | None = None
        self._output_token_ids = request.token_ids[request.num_prompt_tokens :]

    def append(self, token_id: int) -> None:
        """Note the next output token."""
        self._output_token_ids.append(token_id)

    def apply(self, logits: Tensor) -> Tensor:
        """Return ``logits``, ``[V]``, as the processors leave them."""
        if self._made is None:
            self._made = [self._guarded(one.name, one.make) for one in self._wanted]
        output_token_ids = tuple(self._output_token_ids)
        for one in self._made:
            logits = self._guarded(one.name, one.apply, output_token_ids, logits)
            _check(one.name, logits, one.request.vocab_size)
            logits = logits.float()
        return logits

    @staticmethod
    def _guarded(name: str, function, *args):  # a foreign one
        try:
            return function(*args)
        except BaseException as error:  # whatever an operator's code raises
            raise ProcessorFailedError(f"logits processor {name!r} raised {type(error).__name__}: {error}") from error


def _check(name: str, logits: object, vocab_size: int) -> None:
    if not isinstance(logits, Tensor) or logits.ndim != 1 or len(logits) < vocab_size:
        told = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ProcessorFailedError(f"logits processor {name!r} must return one logit for each token, got {told}")
    highest = torch.max(logits)
    if not torch.isfinite(highest):  # of a NaN among them the highest is one, too
        raise ProcessorFailedError(f"logits processor {name!r} left no token to choose: the highest logit is {highest}")
