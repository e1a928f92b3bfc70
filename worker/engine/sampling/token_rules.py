"""Rules about the next token: allowed_token_ids, bad_words, min_tokens and logit_bias, in vLLM's order.

All are stored as lists of token ids, not as masks over the vocabulary (39 MB at 256 rows of 152k); a step concatenates
the lists of its rows. Like the penalties, the rules depend on ``Request.token_ids`` alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..scheduling.request import Request
from .row_changes import RowStates


class BadWords:
    """Tokens that would complete one of ``sequences``, and are banned as the next output token of one request.

    As in vLLM the sequences are matched with output tokens only. A sequence is indexed by its last token but one, so
    that a new token costs a look-up, not a comparison with every sequence.

    Args:
        sequences: none of them is empty.
        output_token_ids: the output so far, including that of a previous engine.
    """

    def __init__(self, sequences: Iterable[list[int]], output_token_ids: list[int]) -> None:
        single: set[int] = set()
        self._longer: dict[int, list[list[int]]] = {}
        history_len = 0
        for sequence in sequences:
            if len(sequence) == 1:
                single.add(sequence[0])
            else:
                self._longer.setdefault(sequence[-2], []).append(sequence)
                history_len = max(history_len, len(sequence) - 1)
        self._single = np.array(sorted(single), np.int64)
        self._history_len = history_len
        self._latest = output_token_ids[max(0, len(output_token_ids) - history_len) :]

    @property
    def has_history(self) -> bool:
        """Whether the banned tokens depend on output tokens."""
        return self._history_len > 0

    def append(self, token_id: int) -> None:
        """Record the next output token."""
        if self._history_len:
            self._latest.append(token_id)
            del self._latest[: -self._history_len]

    def banned_ids(self) -> NDArray[np.int64]:
        """Return the tokens that would complete a sequence; may contain duplicates."""
        nearly = self._longer.get(self._latest[-1], ()) if self._latest else ()
        completing = [sequence[-1] for sequence in nearly if self._latest[1 - len(sequence) :] == sequence[:-1]]
        return np.concatenate([self._single, completing]).astype(np.int64) if completing else self._single


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
        """Concatenate the places of ``token_ids[i]`` in row ``rows[i]``."""
        lengths = [len(ids) for ids in token_ids]
        return cls(np.repeat(np.array(rows, np.int64), lengths), np.concatenate([_NONE, *token_ids]))

    def on(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of these places in ``logits``."""
        return torch.from_numpy(self.rows).to(logits.device), torch.from_numpy(self.token_ids).to(logits.device)


@dataclass
class TokenRules:
    """Rules of one step.

    Args:
        restricted: ``[A]``, rows with a list of allowed tokens.
        allowed: places that remain in those rows.
        banned: places that are excluded.
        biased: places with a bias; no place occurs twice.
        bias: one value per place of ``biased``.
    """

    restricted: NDArray[np.int64]
    allowed: Places
    banned: Places
    biased: Places
    bias: NDArray[np.float32]

    def apply(self, logits: Tensor) -> Tensor:
        """Change ``logits``, ``[R, V]``, in place if possible; each row independently of the others."""
        if len(self.restricted):
            places = self.allowed.on(logits)
            allowed_logits = logits[places]
            logits[torch.from_numpy(self.restricted).to(logits.device)] = float("-inf")
            logits[places] = allowed_logits
        if len(self.banned.rows):
            logits[self.banned.on(logits)] = float("-inf")
        if len(self.bias):
            logits = logits.float()
            logits[self.biased.on(logits)] += torch.from_numpy(self.bias).to(logits.device)
        return logits


class TokenRuleTable(RowStates["_RequestRules"]):
    """Rules by row of the batch, kept between steps."""

    def set_row(self, row: int, request: Request) -> None:
        """Store the rules of ``request`` in ``row``, if it has any."""
        params = request.params
        has_ending = params.min_tokens > 0 and bool(request.ending_token_ids)
        if has_ending or params.logit_bias or params.bad_words_token_ids or params.allowed_token_ids is not None:
            self._rows[row] = _RequestRules(request)

    def reads_tokens(self, rows: NDArray[np.int64]) -> bool:
        """Return whether one of ``rows``, ``[R]``, has bad words of several tokens. Other rules do not change."""
        return any(rules.bad_words.has_history for _, rules in self._among(rows))

    def select(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> TokenRules | None:
        """Return the rules of ``rows``; None if no row has any.

        Args:
            rows: ``[R]``.
            positions: ``[R]``, indices of their next tokens among the output tokens.
        """
        ruled = self._among(rows)
        if not ruled:
            return None
        indices = [index for index, _ in ruled]
        restricted = [(index, rules.allowed) for index, rules in ruled if rules.allowed is not None]
        restricted_rows = [index for index, _ in restricted]
        return TokenRules(
            restricted=np.array(restricted_rows, np.int64),
            allowed=Places.of(restricted_rows, [allowed for _, allowed in restricted]),
            banned=Places.of(indices, [rules.banned_ids(int(positions[index])) for index, rules in ruled]),
            biased=Places.of(indices, [rules.biased_ids for _, rules in ruled]),
            bias=np.concatenate([rules.bias for _, rules in ruled]),
        )


class _RequestRules:
    """Rules of one request. ``allowed`` is None if any token is allowed."""

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
        """Record the next output token."""
        self.bad_words.append(token_id)

    def banned_ids(self, position: int) -> NDArray[np.int64]:
        """Return the tokens banned at ``position``; fewer if they would leave no allowed token."""
        bad = self.bad_words.banned_ids()
        both = np.concatenate([bad, self._ending]) if position < self._min_tokens else bad
        if self.allowed is None or not len(both):
            return both
        return next((banned for banned in (both, bad) if not np.isin(self.allowed, banned).all()), _NONE)
