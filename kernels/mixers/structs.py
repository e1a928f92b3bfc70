"""Structs of ``kernels/native/mixers.h``, field by field."""

from __future__ import annotations

import ctypes

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class MixerStruct(ctypes.Structure):
    _fields_ = (
        *((name, _INT) for name in ("kind", "num_taps", "num_channels")),
        *((name, _INT) for name in ("num_heads", "num_groups", "head_dim", "key_dim")),
        *((name, _INT) for name in ("values_at", "gate_at", "strength_at", "step_at")),
        *((name, _INT) for name in ("norm_size", "norm_weights", "gates_first")),
        *((name, _FLOAT) for name in ("eps", "smallest_step")),
        *((name, _POINTER) for name in ("taps", "taps_bias", "decay", "step_bias", "skip", "norm", "order")),
        *((name, _POINTER) for name in ("recent", "states")),
    )


class MixerStepStruct(ctypes.Structure):
    _fields_ = (
        *((name, _INT) for name in ("num_tokens", "num_requests")),
        *((name, _POINTER) for name in ("query_lens", "reads", "writes")),
    )
