"""What ``kernels/native/decoder.h`` declares, field by field."""

from __future__ import annotations

import ctypes

from ..linear import LinearStruct

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class LayerStruct(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, LinearStruct) for name in ("qkv", "output", "gate_up", "down")),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("scale", _FLOAT),
        ("window", _INT),
    )


class DecoderStruct(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(LayerStruct)),
        *((name, _INT) for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")),
        *((name, _INT) for name in ("mlp_size", "block_size")),
        ("norm_eps", _FLOAT),
        ("head_norm_eps", _FLOAT),
        ("embeddings", _POINTER),
        ("final_norm", _POINTER),
        ("lm_head", LinearStruct),
    )


class StepStruct(ctypes.Structure):
    _fields_ = (
        *((name, _INT) for name in ("num_tokens", "num_requests", "num_logit_rows")),
        *((name, _POINTER) for name in ("token_ids", "positions", "slots", "inputs_embeds", "cos", "sin")),
        ("block_table", _POINTER),
        ("table_stride", _INT),
        *((name, _POINTER) for name in ("query_lens", "seq_lens", "logit_rows", "logits")),
        *((name, _POINTER) for name in ("adapter_slots", "adapted")),
        ("num_adapter_slots", _INT),
    )
