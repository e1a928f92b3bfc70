"""Which tokens a row may get: allowed_token_ids, bad_words, min_tokens and logit_bias, in vLLM's order.

All are kept as lists of token ids, never as masks over the vocabulary (39 MB at 256 rows of 152k), and a step joins
those of its rows. Like the penalties, what a row may get follows from ``Request.token_ids`` alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..scheduling.request import Request
from .bad_words import BadWords
from .row_states import RowStates

_NONE = np.zeros(0, np.int64)


@dataclass
class Places:
    """Single logits of a step.

    Args:
        rows, token_ids: ``[E]``.
    """

    rows: NDArray[np.int64]
    token_ids: NDArray[np.int64]

    @classmethod
    def of(cls, rows: list[int], token_ids: list[NDArray[np.int64]]) -> Places:
        """Those of ``token_ids[i]`` in row ``rows[i]``."""
        lengths = [len(ids) for ids in token_ids]
        return cls(np.repeat(np.array(rows, np.int64), lengths), np.concatenate([_NONE, *token_ids]))

    def on(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The index of these logits."""
        return torch.from_numpy(self.rows).to(logits.device), torch.from_numpy(self.token_ids).to(logits.device)


@dataclass
class TokenRules:
    """The rules of one step.

    Args:
        restricted: ``[A]``, the rows that may get allowed tokens only.
        allowed: what those may get.
        banned: what no row may get.
        biased: no place comes twice.
        bias: one per place of ``biased``.
    """

    restricted: NDArray[np.int64]
    allowed: Places
    banned: Places
    biased: Places
    bias: NDArray[np.float32]

    def apply(self, logits: Tensor) -> Tensor:
        """Change ``logits``, ``[R, V]``, in place where that can be; each row by itself, whatever the others are."""
        if len(self.restricted):
            places = self.allowed.on(logits)
            kept = logits[places]
            logits[torch.from_numpy(self.restricted).to(logits.device)] = float("-inf")
            logits[places] = kept
        if len(self.banned.rows):
            logits[self.banned.on(logits)] = float("-inf")
        if len(self.bias):
            logits = logits.float()
            logits[self.biased.on(logits)] += torch.from_numpy(self.bias).to(logits.device)
        return logits


class TokenRuleTable(RowStates["_RequestRules"]):
    """The rules of those rows of the batch whose requests have any, kept from step to step."""

    def set_row(self, row: int, request: Request) -> None:
        """Take up the rules of ``request`` in ``row``, if it has any."""
        params = request.params
        has_ending = params.min_tokens > 0 and bool(request.ending_token_ids)
        if has_ending or params.logit_bias or params.bad_words_token_ids or params.allowed_token_ids is not None:
            self._rows[row] = _RequestRules(request)

    def take(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> TokenRules | None:
        """What to change in the logits of ``rows``; None if none has a rule.

        Args:
            rows: ``[R]``.
            positions: ``[R]``, places of their next tokens among the output tokens.
        """
        found = self._among(rows)
        if not found:
            return None
        indices = [index for index, _ in found]
        restricted = [(index, rules.allowed) for index, rules in found if rules.allowed is not None]
        restricted_rows = [index for index, _ in restricted]
        return TokenRules(
            restricted=np.array(restricted_rows, np.int64),
            allowed=Places.of(restricted_rows, [allowed for _, allowed in restricted]),
            banned=Places.of(indices, [rules.banned_ids(int(positions[index])) for index, rules in found]),
            biased=Places.of(indices, [rules.biased_ids for _, rules in found]),
            bias=np.concatenate([rules.bias for _, rules in found]),
        )


class _RequestRules:
    """The rules of one request. ``allowed`` is None where any token is."""

    def __init__(self, request: Request) -> None:
        params = request.params
        allowed, bias = params.allowed_token_ids, params.logit_bias or {}
        self.allowed = None if allowed is None else np.unique(np.array(allowed, np.int64))
        self.biased_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self.bias = np.fromiter(bias.values(), np.float32, len(bias))
        self.bad_words = BadWords(params.bad_words_token_ids or (), request.token_ids[request.num_prompt_tokens :])
        self._min_tokens = params.min_tokens
        self._ending = np.array(sorted(request.ending_token_ids), np.int64)

    def append(self, token_id: int) -> None:
        """Note the next output token."""
        self.bad_words.append(token_id)

    def banned_ids(self, position: int) -> NDArray[np.int64]:
        """What the token at ``position`` may not be. Where an allowed list would be left empty, less is banned."""
        bad = self.bad_words.banned_ids()
        both = np.concatenate([bad, self._ending]) if position < self._min_tokens else bad
        if self.allowed is None or not len(both):
            return both
        return next((banned for banned in (both, bad) if not np.isin(self.allowed, banned).all()), _NONE)
