"""The packed arrays of one step. The batch builds them from a schedule; the model and the sampler read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

IntArray = NDArray[np.int64]


@dataclass
class StepInput:
    """Inputs of the model for one step.

    Requests that decode come first, and requests of one adapter are adjacent, so their order may differ from the
    scheduler's.

    Args:
        order: ``[B]`` index into the scheduler's batch.
        rows: ``[B]`` rows of the ``InputBatch``.
        token_ids, positions, slot_mapping: ``[T]``. A negative token id is an index of ``fed_tokens``, as in Python.
        query_lens, seq_lens: ``[B]``.
        logit_rows: ``[L]`` packed tokens that need logits: the last known token of each request that is sampled, and
            its draft tokens. Without draft tokens ``L`` is ``R``.
        sampled: ``[R]`` index of the sampled requests into ``order`` and ``rows``.
        token_lora: ``[T]``, adapter of each token, negative for none; None if no token has an adapter.
        token_types: ``[T]``, 1 for tokens of the second text of a pair; None without pairs.
        num_drafts: ``[R]``, number of draft tokens at the end of each request; None without draft tokens.
        group_slots: ``[G, T]``, slots of each group of layers, ``slot_mapping`` first; None for a single group.
        fed_tokens: tokens that the step before has sampled, on the device; None if the host knows all tokens.
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
    num_drafts: IntArray | None = None
    group_slots: IntArray | None = None
    fed_tokens: Tensor | None = None

    @property
    def sampled_rows(self) -> IntArray:
        """``[R]`` rows of the sampled requests in the ``InputBatch``."""
        return self.rows if len(self.sampled) == len(self.rows) else self.rows[self.sampled]

    @property
    def num_known_tokens(self) -> IntArray:
        """``[R]`` number of tokens of the sampled requests, without draft tokens."""
        seq_lens = self.seq_lens[self.sampled]
        return seq_lens if self.num_drafts is None else seq_lens - self.num_drafts

    @property
    def first_logits(self) -> IntArray | None:
        """``[R]`` index in ``logit_rows`` of each request's first row; None if each request has one row."""
        if self.num_drafts is None:
            return None
        return np.cumsum(self.num_drafts + 1) - self.num_drafts - 1
