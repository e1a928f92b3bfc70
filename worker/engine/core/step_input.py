"""One step's work as arrays, packed: what the batch makes of a schedule, and the model and the sampler read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass
class StepInput:
    """What the model needs for one step. Decodes come first, and those of one adapter lie together, so ``order`` may
    differ from the scheduler's.

    Args:
        order: ``[B]`` index into the scheduler's batch.
        rows: ``[B]`` rows of the ``InputBatch``.
        token_ids, positions, slot_mapping: ``[T]``.
        query_lens, seq_lens: ``[B]``.
        logit_rows: ``[L]`` packed tokens whose logits are needed: of each request that catches up the last known one,
            and its guesses. Without guesses ``L`` is ``R``.
        sampled: ``[R]`` their index into ``order`` and ``rows``.
        token_lora: ``[T]``, the adapter of each token, negative for none; None if no token has one.
        token_types: ``[T]``, 1 for tokens of the second text of a pair; None if there is no pair.
        num_guesses: ``[R]``, how many of the last tokens of each are guesses; None if none is.
        group_slots: ``[G, T]``, the slots of each group of layers, ``slot_mapping`` first; None if there is one.
    """

    order: IntArray
    rows: IntArray
    token_ids: IntArray
    positions: IntArray
    slot_mapping: IntArray
    query_lens: IntArray
    seq_lens: IntArray
    logit_rows: IntArray
    sampled: IntArray
    token_lora: IntArray | None = None
    token_types: IntArray | None = None
    num_guesses: IntArray | None = None
    group_slots: IntArray | None = None

    @property
    def sampled_rows(self) -> IntArray:
        """``[R]`` rows of the ``InputBatch``."""
        return self.rows if len(self.sampled) == len(self.rows) else self.rows[self.sampled]

    @property
    def num_known_tokens(self) -> IntArray:
        """``[R]``, of those that are sampled, without guesses."""
        seq_lens = self.seq_lens[self.sampled]
        return seq_lens if self.num_guesses is None else seq_lens - self.num_guesses

    @property
    def first_logits(self) -> IntArray | None:
        """``[R]``, where in ``logit_rows`` those of each request begin; None if it has one of each."""
        if self.num_guesses is None:
            return None
        return np.cumsum(self.num_guesses + 1) - self.num_guesses - 1
