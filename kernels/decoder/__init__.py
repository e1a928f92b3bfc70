"""Run a whole decoder step in one call of the compiled library, on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..dispatch import KernelInputError
from ..huge_pages import StepResults
from ..kv_cache import scales_per_head
from ..lora.packed import ProductStruct
from ..mixers import MixerState, MixingBatch
from ..native import library
from .experts import ExpertsHolder, ExpertsWeights, can_mix_experts
from .structs import AnglesStruct, DecoderStruct, NormWeights, StepStruct, address, norm_struct
from .weights import (
    AttentionGate,
    DecoderWeights,
    EmbeddingPart,
    HeadsShape,
    LayerEmbeddings,
    LayerWeights,
    embedding_part_struct,
    layer_embeddings_struct,
    layer_structs,
    linear_struct,
)

__all__ = [
    "GATE_UP",
    "PRODUCTS_PER_LAYER",
    "QKV",
    "AttentionGate",
    "Decoder",
    "DecoderBatch",
    "DecoderWeights",
    "EmbeddingPart",
    "ExpertsWeights",
    "HeadsShape",
    "LayerAdapters",
    "LayerEmbeddings",
    "LayerWeights",
    "NormWeights",
    "can_cache",
    "can_decode",
    "can_mix_experts",
]

# Products of a layer that adapters may add to: qkv, output, gate_up, down.
PRODUCTS_PER_LAYER = 4
QKV, GATE_UP = 0, 2

LANES = 16
_MAX_HEAD_DIM = 512


@dataclass
class DecoderBatch:
    """Packed tokens of one step. Tokens of a request are adjacent and in order.

    Args:
        token_ids, positions: ``[T]`` int64.
        slot_mapping: ``[T]`` int64, or ``[G, T]`` for layers in groups; a token with a negative slot is not stored.
        block_table: ``[B, MB]`` int64, or ``[G, B, MB]``; the requests of ``query_lens`` and ``seq_lens``.
        query_lens, seq_lens: ``[B]`` int64.
        logit_rows: ``[R]`` int64 ascending, the tokens that need logits.
        angles: for each rotary embedding that layers refer to, cosines and sines of all positions, ``[P, R]`` float32;
            both halves of a row are equal.
        inputs_embeds: ``[T, hidden size]``, replaces the embeddings of ``token_ids``; None to use those.
        token_lora: ``[T]`` int64, a slot of ``LayerAdapters`` per token, negative for none; None if no token has one.
        visible_ends: ``[T]`` int64, never decreasing within a request, see ``kernels.paged_attention.PagedBatch``; None
            if no token sees beyond itself.
        states: slots of the states of layers with a mixer; None without such layers.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    query_lens: Tensor
    seq_lens: Tensor
    logit_rows: Tensor
    angles: Sequence[tuple[Tensor, Tensor]]
    inputs_embeds: Tensor | None = None
    token_lora: Tensor | None = None
    visible_ends: Tensor | None = None
    states: MixingBatch | None = None


@dataclass(frozen=True)
class LayerAdapters:
    """Adapters of the products of each layer.

    Args:
        products: ``[layers, PRODUCTS_PER_LAYER, num_slots]``; the contents may change between two steps.
    """

    products: ctypes.Array[ProductStruct]
    num_slots: int


def can_decode(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether the compiled library is loaded and supports such a model."""
    return library("run_decoder", dtype) is not None and head_dim % LANES == 0 and head_dim <= _MAX_HEAD_DIM


def can_cache(block_size: int) -> bool:
    """Return whether blocks can have this many tokens, which must be even since values are multiplied in pairs."""
    return block_size % 2 == 0


class Decoder:
    """A model with its paged KV cache. Call ``use_cache`` once, then ``run`` in every step.

    A token's logits have the same bits in every batch. The decoder stores the addresses of its weights without keeping
    them alive: a caller that frees a weight has to build a new decoder.

    Raises:
        KernelInputError: ``can_decode`` is False for the model.
    """

    def __init__(self, weights: DecoderWeights) -> None:
        self._dtype = weights.embeddings.dtype
        for dim in (weights.heads_of(layer).head_dim for layer in weights.layers):
            if not can_decode(self._dtype, dim):
                raise KernelInputError(f"a decoder of {self._dtype} with head_dim {dim} is not supported here")
        self._layers = layer_structs(weights)
        # The layer structs point to these.
        self._mixers = {i: layer.mixer.struct() for i, layer in enumerate(weights.layers) if layer.mixer is not None}
        for index, mixer in self._mixers.items():
            self._layers[index].mixer = ctypes.addressof(mixer)
        self._experts = {
            i: ExpertsHolder(layer.experts) for i, layer in enumerate(weights.layers) if layer.experts is not None
        }
        for index, experts in self._experts.items():
            self._layers[index].experts = experts.address
        parts = {i: layer.embedding_part for i, layer in enumerate(weights.layers)}
        self._embedding_parts = {i: embedding_part_struct(part) for i, part in parts.items() if part is not None}
        for index, part in self._embedding_parts.items():
            self._layers[index].embedding_part = ctypes.addressof(part)
        self._struct = DecoderStruct(
            layers=self._layers,
            num_layers=len(self._layers),
            hidden_size=weights.embeddings.shape[1],
            mlp_size=max((layer.down.num_inputs for layer in weights.layers if layer.down), default=0),
            block_size=1,
            norms_stream=weights.norms_stream,
            embeds_by_head=weights.embeds_by_head,
            token_scale=weights.token_scale,
            stream_scale=weights.stream_scale,
            logit_scale=weights.logit_scale,
            logit_softcap=weights.logit_softcap or 0.0,
            embeddings=weights.embeddings.data_ptr(),
            final_norm=norm_struct(weights.final_norm),
            lm_head=linear_struct(weights.lm_head),
        )
        if weights.layer_embeddings is not None:
            self._layer_embeddings = layer_embeddings_struct(weights.layer_embeddings)
            self._struct.layer_embeddings = ctypes.addressof(self._layer_embeddings)
        self._caches: list[Tensor] = []
        self._states: list[MixerState] = []
        self._num_groups = 1
        self._adapters: LayerAdapters | None = None
        self._results = StepResults()

    def cache_shape(
        self, num_blocks: int, block_size: int, layer: int = 0, dtype: torch.dtype | None = None
    ) -> tuple[int, int, int]:
        """Return the shape of a layer's keys, and of its values. Blocks are padded to a multiple of 16 tokens.

        Args:
            dtype: of the cache: int8, whose heads are followed by their scales, or that of the model (None).
        """
        padded, head_dim = -(-block_size // LANES) * LANES, self._layers[layer].head_dim
        scale_bytes = torch.bfloat16.itemsize * scales_per_head(head_dim) if dtype == torch.int8 else 0
        return num_blocks, self._layers[layer].num_kv_heads, padded * (head_dim + scale_bytes)

    def use_cache(
        self, keys: list[Tensor], values: list[Tensor], block_size: int, groups: Sequence[int] | None = None
    ) -> None:
        """Store keys and values of each layer in these tensors of ``cache_shape`` from now on.

        Args:
            keys, values: all in the model's dtype, or all in int8. Blocks of a layer may be apart, at the same distance
                in both tensors: parts of one tensor with all layers can serve.
            groups: group of each layer, which selects its slots and block table; None if all layers share one. Layers
                of different groups may share a tensor. A layer that does not store shares the tensor of the layer
                whose keys and values it reads.

        Raises:
            KernelInputError: ``block_size`` is odd, or the parts of a block are not contiguous.
        """
        if not can_cache(block_size):
            raise KernelInputError(f"a block must have an even number of tokens, got {block_size}")
        groups = [0] * len(keys) if groups is None else groups
        for layer, key, value, group in zip(self._layers, keys, values, groups, strict=True):
            if key.stride() != value.stride() or not key[:1].is_contiguous():
                raise KernelInputError(
                    f"blocks of keys and values must be contiguous and equally far apart, got strides {key.stride()} "
                    f"and {value.stride()}"
                )
            layer.keys, layer.values, layer.group = key.data_ptr(), value.data_ptr(), group
            layer.block_bytes = key.stride(0) * key.itemsize
        self._num_groups = max(groups, default=0) + 1
        self._struct.block_size = max(1, block_size)
        self._struct.caches_bytes = any(cache.dtype == torch.int8 for cache in keys)
        self._caches = [*keys, *values]

    def use_states(self, states: Sequence[MixerState]) -> None:
        """Store the states of layers with a mixer there from now on, in the order of these layers."""
        for mixer, state in zip(self._mixers.values(), states, strict=True):
            mixer.recent, mixer.states = state.recent.data_ptr(), state.states.data_ptr()
        self._states = list(states)

    def use_adapters(self, adapters: LayerAdapters | None) -> None:
        """Use these adapters for ``token_lora`` of a batch from now on.

        Raises:
            KernelInputError: there is not a struct for each slot of each product of the layers.
        """
        if adapters is not None:
            expected = len(self._layers) * PRODUCTS_PER_LAYER * adapters.num_slots
            if len(adapters.products) != expected:
                raise KernelInputError(f"adapters.products must have {expected} slots, got {len(adapters.products)}")
        self._adapters = adapters

    def run(self, batch: DecoderBatch) -> Tensor:
        """Store the step's keys and values and return logits ``[R, V]``, float32, rounded to the model's dtype.

        A model without a head returns normalised hidden states ``[R, hidden size]``.

        Raises:
            KernelInputError: a tensor is not int64 or contiguous, or the library was unloaded.

        Cost: for few tokens memory bound by the weights and by the keys and values that are read.
        """
        (logits,) = self.run_all([batch])
        return logits

    def run_all(self, batches: Sequence[DecoderBatch]) -> list[Tensor]:
        """Run several batches that share neither blocks nor slots.

        With at least as many batches as the library has threads, each thread runs whole batches, so that threads do not
        synchronize between operations. A token's result has the same bits either way.

        Raises:
            KernelInputError: as ``run``.
        """
        function = library("run_decoder", self._dtype)
        if function is None:
            raise KernelInputError("the compiled library was unloaded")
        size = self._struct.lm_head.num_outputs or self._struct.hidden_size
        num_rows = [len(batch.logit_rows) for batch in batches]
        logits = self._results.empty(sum(num_rows), size).split(num_rows)
        structs = [self._step_struct(batch, out) for batch, out in zip(batches, logits, strict=True)]
        steps = (StepStruct * len(structs))(*structs)
        with torch.profiler.record_function("penstock::decoder"):
            function(ctypes.byref(self._struct), steps, len(structs))
        return list(logits)

    def _step_struct(self, batch: DecoderBatch, logits: Tensor) -> StepStruct:
        for name in ("token_ids", "positions", "slot_mapping", "block_table", "query_lens", "seq_lens", "logit_rows"):
            tensor: Tensor = getattr(batch, name)
            if tensor.dtype != torch.int64 or not tensor.is_contiguous():
                raise KernelInputError(f"{name} must be int64 and contiguous, got {tensor.dtype} {tensor.stride()}")
        if batch.slot_mapping.numel() < self._num_groups * len(batch.token_ids) or (
            batch.block_table.numel() < self._num_groups * len(batch.query_lens) * batch.block_table.shape[-1]
        ):
            raise KernelInputError(
                f"slot_mapping and block_table must have a part for each of {self._num_groups} groups of layers, got "
                f"{tuple(batch.slot_mapping.shape)} and {tuple(batch.block_table.shape)}"
            )
        if any(table.dtype != torch.float32 or not table.is_contiguous() for pair in batch.angles for table in pair):
            raise KernelInputError("angles must be float32 and contiguous")
        angles = (AnglesStruct * len(batch.angles))(
            *(AnglesStruct(cos.data_ptr(), sin.data_ptr(), cos.shape[1]) for cos, sin in batch.angles)
        )
        return StepStruct(
            num_tokens=len(batch.token_ids),
            num_requests=len(batch.query_lens),
            num_logit_rows=len(batch.logit_rows),
            token_ids=batch.token_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=batch.slot_mapping.data_ptr(),
            inputs_embeds=address(batch.inputs_embeds),
            angles=angles,
            block_table=batch.block_table.data_ptr(),
            table_stride=batch.block_table.shape[-1],
            query_lens=batch.query_lens.data_ptr(),
            seq_lens=batch.seq_lens.data_ptr(),
            logit_rows=batch.logit_rows.data_ptr(),
            logits=logits.data_ptr(),
            visible_ends=address(_checked_ends(batch)),
            **self._adapter_fields(batch),
            **self._state_fields(batch),
        )

    def _state_fields(self, batch: DecoderBatch) -> dict[str, int]:
        """Return the fields of a step that locate the states of layers with a mixer."""
        if not self._mixers:
            return {}
        if batch.states is None or len(self._states) != len(self._mixers):
            raise KernelInputError("layers keep states: call use_states first, and pass states with each batch")
        return {"state_reads": batch.states.reads.data_ptr(), "state_writes": batch.states.writes.data_ptr()}

    def _adapter_fields(self, batch: DecoderBatch) -> dict[str, int]:
        """Return the fields of a step that locate its adapters."""
        token_lora, adapters = batch.token_lora, self._adapters
        if token_lora is None:
            return {}
        is_supported = (
            token_lora.dtype == torch.int64 and token_lora.is_contiguous() and len(token_lora) == len(batch.token_ids)
        )
        if adapters is None or not is_supported:
            raise KernelInputError(
                f"token_lora must be int64 [{len(batch.token_ids)}] after use_adapters, got {token_lora.dtype} "
                f"{tuple(token_lora.shape)}"
            )
        return {
            "adapter_slots": token_lora.data_ptr(),
            "adapted": ctypes.addressof(adapters.products),
            "num_adapter_slots": adapters.num_slots,
        }


def _checked_ends(batch: DecoderBatch) -> Tensor | None:
    ends = batch.visible_ends
    if ends is None:
        return None
    if ends.dtype != torch.int64 or not ends.is_contiguous() or len(ends) != len(batch.token_ids):
        raise KernelInputError(f"visible_ends must be int64 [{len(batch.token_ids)}], got {ends.dtype} {ends.shape}")
    return ends
