"""In C++, for the CPU: a state is read and written once for a token."""

from __future__ import annotations

import ctypes

from torch import Tensor

from ..native import library
from . import reference
from .structs import MixerStepStruct
from .weights import LANES, MixerState, MixerWeights, MixingBatch


def mix(rows: Tensor, weights: MixerWeights, state: MixerState, batch: MixingBatch) -> Tensor:
    """See ``mixers.mix``."""
    function = library("mix", rows.dtype)
    if function is None or weights.head_dim % LANES:
        return reference.mix(rows, weights, state, batch)
    struct = weights.struct()
    struct.recent, struct.states = state.recent.data_ptr(), state.states.data_ptr()
    step = MixerStepStruct(
        *(len(rows), len(batch.query_lens)),
        *(tensor.data_ptr() for tensor in (batch.query_lens, batch.reads, batch.writes)),
    )
    out = rows.new_empty(len(rows), weights.num_outputs)
    function(
        *(ctypes.byref(struct), ctypes.byref(step)),
        *(rows.data_ptr(), rows.shape[1], out.data_ptr(), out.shape[1]),
    )
    return out
