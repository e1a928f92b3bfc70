"""Structs of ``kernels/native/decoder/decoder.h``, field by field, and the weights of a normalisation as one."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from ..linear import LinearStruct

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class NormStruct(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("bias", _POINTER), ("kind", _INT), ("eps", _FLOAT))


class AnglesStruct(ctypes.Structure):
    _fields_ = (("cos", _POINTER), ("sin", _POINTER), ("dim", _INT))


class ExpertsStruct(ctypes.Structure):
    """Struct of ``kernels/native/decoder/experts.h``."""

    _fields_ = (
        ("router", LinearStruct),
        ("choice_bias", _POINTER),
        *((name, ctypes.POINTER(LinearStruct)) for name in ("gate_up", "down")),
        ("shared_gate", LinearStruct),
        *((name, _INT) for name in ("num_experts", "num_chosen", "has_sigmoids", "renormalizes")),
        *((name, _INT) for name in ("rounds_logits", "rounds_weights", "activation", "is_gated")),
        *((name, _FLOAT) for name in ("scale", "alpha", "limit")),
        *((name, NormStruct) for name in ("router_norm", "input_norm", "out_norm", "shared_norm")),
        *((name, _POINTER) for name in ("input_scale", "expert_scale")),
        ("input_factor", _FLOAT),
    )


class LayerStruct(ctypes.Structure):
    _fields_ = (
        *((name, NormStruct) for name in ("input_norm", "attention_norm", "mlp_norm", "mlp_out_norm")),
        *((name, NormStruct) for name in ("query_norm", "key_norm", "value_norm")),
        *((name, LinearStruct) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _POINTER) for name in ("keys", "values")),
        ("block_bytes", _INT),
        ("sinks", _POINTER),
        *((name, _FLOAT) for name in ("scale", "softcap", "residual_scale")),
        *((name, _INT) for name in ("window", "ahead", "angles", "is_interleaved", "norms_rows", "norms_follow")),
        *((name, _INT) for name in ("is_parallel", "activation", "is_gated", "gate")),
        ("mixer", _POINTER),
        ("group", _INT),
        ("experts", _POINTER),
        *((name, _INT) for name in ("num_heads", "num_kv_heads", "head_dim", "stores", "values_are_keys")),
        *((name, _POINTER) for name in ("embedding_part", "out_scale")),
    )


class LayerEmbeddingsStruct(ctypes.Structure):
    """Struct of ``kernels/native/decoder/layer_embeddings.h``, as ``EmbeddingPartStruct``."""

    _fields_ = (
        ("table", _POINTER),
        ("projection", LinearStruct),
        ("norm", NormStruct),
        ("size", _INT),
        *((name, _FLOAT) for name in ("table_scale", "projection_scale", "sum_scale")),
    )


class EmbeddingPartStruct(ctypes.Structure):
    _fields_ = (("gate", LinearStruct), ("output", LinearStruct), ("norm", NormStruct), ("activation", _INT))


class DecoderStruct(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(LayerStruct)),
        *((name, _INT) for name in ("num_layers", "hidden_size", "mlp_size", "block_size")),
        *((name, _INT) for name in ("caches_bytes", "norms_stream", "embeds_by_head")),
        *((name, _FLOAT) for name in ("token_scale", "stream_scale", "logit_scale", "logit_softcap")),
        ("embeddings", _POINTER),
        ("final_norm", NormStruct),
        ("lm_head", LinearStruct),
        ("layer_embeddings", _POINTER),
    )


class StepStruct(ctypes.Structure):
    _fields_ = (
        *((name, _INT) for name in ("num_tokens", "num_requests", "num_logit_rows")),
        *((name, _POINTER) for name in ("token_ids", "positions", "slots", "inputs_embeds")),
        ("angles", ctypes.POINTER(AnglesStruct)),
        ("block_table", _POINTER),
        ("table_stride", _INT),
        *((name, _POINTER) for name in ("query_lens", "seq_lens", "logit_rows", "logits")),
        *((name, _POINTER) for name in ("adapter_slots", "adapted")),
        ("num_adapter_slots", _INT),
        ("visible_ends", _POINTER),
        *((name, _POINTER) for name in ("state_reads", "state_writes")),
    )


class NormKind(IntEnum):
    """Kind of a normalisation, with the values of ``kernels/native/decoder/layer_switches.h``.

    ``RMS`` rounds before it multiplies by the weight, ``WIDE_RMS`` only after, ``CENTRED`` subtracts the mean first.
    """

    NONE = 0
    RMS = 1
    WIDE_RMS = 2
    CENTRED = 3


@dataclass(frozen=True)
class NormWeights:
    """Weights of a normalisation.

    Args:
        weight: ``[E]``, or ``[H, D]`` for heads; float32 for a result that is rounded once.
        is_centred: subtract the mean first; the weight is float32 then.
        bias: as ``weight``, for a centred norm; None without.
    """

    weight: Tensor
    eps: float
    is_centred: bool = False
    bias: Tensor | None = None

    @property
    def is_wide(self) -> bool:
        """Whether the product with the weight is computed in float32."""
        return self.weight.dtype is torch.float32


def norm_struct(norm: NormWeights | None) -> NormStruct:
    if norm is None:
        return NormStruct(None, None, NormKind.NONE, 0.0)
    wide_or_plain = NormKind.WIDE_RMS if norm.is_wide else NormKind.RMS
    kind = NormKind.CENTRED if norm.is_centred else wide_or_plain
    return NormStruct(norm.weight.data_ptr(), address(norm.bias), kind, norm.eps)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
