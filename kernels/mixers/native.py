"""Compiled kernel for the CPU: a state is read and written once per token."""

from __future__ import annotations

import ctypes

from torch import Tensor

from ..native import library
from . import reference
from .weights import LANES, MixerState, MixerStepStruct, MixerWeights, MixingBatch


def mix(rows: Tensor, weights: MixerWeights, state: MixerState, batch: MixingBatch) -> Tensor:
    """See ``mixers.mix``."""
    function = library("mix", rows.dtype)
    if function is None or weights.head_dim % LANES:
        return reference.mix(rows, weights, state, batch)
    struct = weights.struct()
    struct.recent, struct.states = state.recent.data_ptr(), state.states.data_ptr()
    step = MixerStepStruct(
        num_tokens=len(rows),
        num_requests=len(batch.query_lens),
        query_lens=batch.query_lens.data_ptr(),
        reads=batch.reads.data_ptr(),
        writes=batch.writes.data_ptr(),
    )
    out = rows.new_empty(len(rows), weights.num_outputs)
    pointers = ctypes.byref(struct), ctypes.byref(step)
    function(*pointers, rows.data_ptr(), rows.shape[1], out.data_ptr(), out.shape[1])
    return out
