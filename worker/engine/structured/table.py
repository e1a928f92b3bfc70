"""Applies grammars to logits, as the last change of the logits, so that no other change can bypass it.

On the CPU each byte of the mask is replaced by eight bounds from a table, infinity or minus infinity, and the result is
the minimum of logit and bound. This takes 1.6 ms for 64 rows of 50k tokens whatever the mask allows, compared to 3 to
21 ms with ``masked_fill_``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..scheduling.request import Constraint, Request
from .constraint import new_bitmask
from .grammar import Bitmask

_BOUNDS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf)
_BOUNDS = _BOUNDS.astype(np.float32)


@dataclass
class GrammarMask:
    """The allowed tokens of the constrained rows of one step.

    Args:
        rows: ``[G]``, indexes of the constrained rows in the logits.
        bitmask: ``[G, ceil(V / 32)]``.
        contested: the rows in which another parameter may have excluded all allowed tokens.
    """

    rows: list[int]
    bitmask: Bitmask
    contested: list[tuple[int, Constraint]]

    def apply(self, logits: Tensor) -> Tensor:
        """See ``sampler.LogitsChange``."""
        logits = logits.float()
        if logits.is_cuda:
            self._apply_at_once(logits)
        else:
            self._apply_by_rows(logits)
        for row, constraint in self.contested:
            self._resolve_contested(logits[row], row, constraint)
        return logits

    def _apply_by_rows(self, logits: Tensor) -> None:
        bounds = np.empty((self.bitmask.shape[1] * 4, 8), np.float32)
        vocab_size = logits.shape[1]
        flat = torch.from_numpy(bounds).view(-1)[:vocab_size]
        for row, words in zip(self.rows, self.bitmask, strict=True):
            np.take(_BOUNDS, words.view(np.uint8), axis=0, out=bounds, mode="clip")
            torch.minimum(logits[row], flat, out=logits[row])

    def _apply_at_once(self, logits: Tensor) -> None:
        words = torch.from_numpy(self.bitmask).to(logits.device)
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        is_masked = ((words[:, :, None] >> bits) & 1 == 0).flatten(1)[:, : logits.shape[1]]
        if len(self.rows) == len(logits):
            logits.masked_fill_(is_masked, float("-inf"))
        else:
            index = torch.tensor(self.rows, device=logits.device)
            logits[index] = logits[index].masked_fill_(is_masked, float("-inf"))

    def _resolve_contested(self, logits: Tensor, row: int, constraint: Constraint) -> None:
        """If no token is allowed, allow the end of the grammar despite ``min_tokens``, or else fail the request."""
        if not torch.isneginf(logits).all():
            return
        words = self.bitmask[self.rows.index(row)]
        ending = [t for t in constraint.ending_token_ids if int(words[t // 32]) >> (t % 32) & 1]
        if ending:
            logits[ending] = 0.0
        else:
            constraint.fail_no_allowed_tokens()
            logits[0] = 0.0  # a token to sample, whose result is dropped


class GrammarTable:
    """The constraints of the batch, by row; see ``sampler.ChangeTable``."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Constraint, bool, int]] = {}
        self._bitmask: Bitmask | None = None

    def set_row(self, row: int, request: Request) -> None:
        """Set the constraint of ``request`` in ``row``, if it has one."""
        if request.constraint is not None:
            params = request.params
            excludes = params.allowed_token_ids is not None or bool(params.bad_words)
            self._rows[row] = (request.constraint, excludes, params.min_tokens)

    def forget_row(self, row: int) -> None:
        """Drop the constraint of ``row``, if it has one."""
        self._rows.pop(row, None)

    def append_tokens(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Advance the grammars of ``rows`` by ``token_ids``, both ``[R]``, before further tokens of the same step."""
        if self._rows:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                # A constraint that has ended may still be in a batch that was scheduled before.
                if row in self._rows and not (constraint := self._rows[row][0]).is_terminated:
                    constraint.accept(token_id)

    def reads_tokens(self, rows: NDArray[np.int64]) -> bool:
        """Return whether one of ``rows``, ``[R]``, has a constraint."""
        return bool(self._rows) and any(row in self._rows for row in rows.tolist())

    def select(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> GrammarMask | None:
        """Return the mask of ``rows``; None if no row has a constraint.

        Args:
            rows: ``[R]``.
            positions: ``[R]``, index of their next tokens in the output.
        """
        if not self._rows:
            return None
        entries = zip(range(len(rows)), rows.tolist(), positions.tolist(), strict=True)
        constrained = [(index, position, *self._rows[row]) for index, row, position in entries if row in self._rows]
        if not constrained:
            return None
        bitmask = self._rows_of_bitmask(len(constrained), constrained[0][2].vocab_size)
        filled: list[int] = []
        contested: list[tuple[int, Constraint]] = []
        for index, position, constraint, excludes, min_tokens in constrained:
            # A constraint that has ended may still be in a batch that was scheduled before.
            if not constraint.is_terminated and constraint.fill(bitmask, len(filled)):
                filled.append(index)
                if excludes or position < min_tokens:
                    contested.append((index, constraint))
        return GrammarMask(filled, bitmask[: len(filled)], contested) if filled else None

    def _rows_of_bitmask(self, num_rows: int, vocab_size: int) -> Bitmask:
        if self._bitmask is None or len(self._bitmask) < num_rows:
            self._bitmask = new_bitmask(num_rows, vocab_size)
        return self._bitmask[:num_rows]
