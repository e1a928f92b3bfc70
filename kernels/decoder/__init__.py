"""A whole decoder step in one call of the compiled library, on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import KernelInputError
from ..lora.packed import ProductStruct
from ..mixers import MixerState, MixingBatch
from ..native import library
from .experts import ExpertsHolder, ExpertsWeights, can_mix_experts
from .layer_structs import embedding_part_struct, layer_embeddings_struct, layer_structs, linear_struct
from .norms import NormWeights, address, norm_struct
from .structs import AnglesStruct, DecoderStruct, StepStruct
from .weights import (
    AttentionGate,
    DecoderWeights,
    EmbeddingPart,
    HeadsShape,
    LayerEmbeddings,
    LayerWeights,
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

# Where adapters may add something: qkv, output, gate and up, down.
PRODUCTS_PER_LAYER = 4
QKV, GATE_UP = 0, 2

LANES = 16
_MAX_HEAD_DIM = 512


@dataclass
class DecoderBatch:
    """One step's tokens, packed; those of a request lie together and in order.

    Args:
        token_ids, positions: ``[T]`` int64.
        slot_mapping: ``[T]`` int64, or ``[G, T]`` where layers are in groups; a negative slot is stored nowhere.
        block_table: ``[B, MB]`` int64, or ``[G, B, MB]``, of the rows ``query_lens`` and ``seq_lens``, ``[B]`` int64.
        logit_rows: ``[R]`` int64 ascending, the tokens whose logits are wanted.
        angles: for each that layers name, cosines and sines of every position that occurs, ``[P, R]`` float32, with
            halves alike.
        inputs_embeds: ``[T, hidden size]`` in place of the embeddings of ``token_ids``; None for those.
        token_lora: ``[T]`` int64, a slot of ``LayerAdapters`` for each token, negative for none; None if none has one.
        visible_ends: ``[T]`` int64, never falling within a request, see ``kernels.paged_attention.PagedBatch``; None
            where each token sees as far as itself.
        states: where requests have what layers with a mixer keep; None where there are none.
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
    """Adapters beside the products of each layer.

    Args:
        products: ``[layers, PRODUCTS_PER_LAYER, num_slots]``; what lies there may change between two steps.
    """

    products: ctypes.Array[ProductStruct]
    num_slots: int


def can_decode(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the compiled library is there, and has a loop for such a model."""
    return library("run_decoder", dtype) is not None and head_dim % LANES == 0 and head_dim <= _MAX_HEAD_DIM


def can_cache(block_size: int) -> bool:
    """Whether a block can have so many tokens: the processor takes some of them in pairs."""
    return block_size % 2 == 0


class Decoder:
    """The model with its paged KV cache. First ``use_cache``, then ``run`` every step.

    A token's logits have the same bits in every batch. It knows where its weights lie and does not keep them alive:
    whoever lets go of one makes another decoder.

    Raises:
        KernelInputError: ``can_decode`` says no.
    """

    def __init__(self, weights: DecoderWeights) -> None:
        self._dtype = weights.embeddings.dtype
        for dim in (weights.heads_of(layer).head_dim for layer in weights.layers):
            if not can_decode(self._dtype, dim):
                raise KernelInputError(f"a decoder of {self._dtype} with heads of {dim} cannot be run here")
        self._layers = layer_structs(weights)
        # The structs of layers point to them.
        self._mixers = {i: layer.mixer.struct() for i, layer in enumerate(weights.layers) if layer.mixer is not None}
        for index, mixer in self._mixers.items():
            self._layers[index].mixer = ctypes.addressof(mixer)
        self._experts = {i: ExpertsHolder(of.experts) for i, of in enumerate(weights.layers) if of.experts is not None}
        for index, experts in self._experts.items():
            self._layers[index].experts = experts.address
        parts = {i: of.embedding_part for i, of in enumerate(weights.layers)}
        self._embedding_parts = {i: embedding_part_struct(part) for i, part in parts.items() if part is not None}
        for index, part in self._embedding_parts.items():
            self._layers[index].embedding_part = ctypes.addressof(part)
        self._struct = DecoderStruct(
            *(self._layers, len(self._layers), weights.embeddings.shape[1]),
            *(
                max((layer.down.num_inputs for layer in weights.layers if layer.down), default=0),
                1,
                weights.norms_stream,
            ),
            *(weights.token_scale, weights.stream_scale, weights.logit_scale, weights.logit_softcap or 0.0),
            *(weights.embeddings.data_ptr(), norm_struct(weights.final_norm), linear_struct(weights.lm_head)),
        )
        if weights.layer_embeddings is not None:
            self._layer_embeddings = layer_embeddings_struct(weights.layer_embeddings)
            self._struct.layer_embeddings = ctypes.addressof(self._layer_embeddings)
        self._caches: list[Tensor] = []
        self._states: list[MixerState] = []
        self._num_groups = 1
        self._adapters: LayerAdapters | None = None

    def cache_shape(self, num_blocks: int, block_size: int, layer: int = 0) -> tuple[int, int, int]:
        """Of a layer's keys, and of its values. Blocks whose size is no multiple of 16 are filled up."""
        padded = -(-block_size // LANES) * LANES
        return num_blocks, self._layers[layer].num_kv_heads, padded * self._layers[layer].head_dim

    def use_cache(
        self, keys: list[Tensor], values: list[Tensor], block_size: int, groups: Sequence[int] | None = None
    ) -> None:
        """From now on keep keys and values of each layer in these tensors of ``cache_shape``.

        Args:
            groups: whose slots and table each layer goes by; None for one table of all. Layers of different groups may
                share a tensor; one that does not store has that of the layer whose keys and values it reads.

        Raises:
            KernelInputError: ``block_size`` is odd.
        """
        if not can_cache(block_size):
            raise KernelInputError(f"a block must have an even number of tokens, got {block_size}")
        groups = [0] * len(keys) if groups is None else groups
        for layer, key, value, group in zip(self._layers, keys, values, groups, strict=True):
            layer.keys, layer.values, layer.group = key.data_ptr(), value.data_ptr(), group
        self._num_groups = max(groups, default=0) + 1
        self._struct.block_size = max(1, block_size)
        self._caches = [*keys, *values]

    def use_states(self, states: Sequence[MixerState]) -> None:
        """From now on keep there what layers with a mixer keep, in their order."""
        for mixer, state in zip(self._mixers.values(), states, strict=True):
            mixer.recent, mixer.states = state.recent.data_ptr(), state.states.data_ptr()
        self._states = list(states)

    def use_adapters(self, adapters: LayerAdapters | None) -> None:
        """From now on ``token_lora`` of a batch means these.

        Raises:
            KernelInputError: they are not as many as the layers have products.
        """
        wanted = 0 if adapters is None else len(self._layers) * PRODUCTS_PER_LAYER * adapters.num_slots
        if adapters is not None and len(adapters.products) != wanted:
            raise KernelInputError(f"adapters must be {wanted}, a slot for each product, got {len(adapters.products)}")
        self._adapters = adapters

    def run(self, batch: DecoderBatch) -> Tensor:
        """Store the step's keys and values and return logits ``[R, V]``, float32, rounded to the model's dtype.

        Without a head what is returned are hidden states ``[R, hidden size]``, normalised.

        Raises:
            KernelInputError: a tensor is not int64 or contiguous, or the library was unloaded.

        Cost: for few tokens memory bound, the bytes of the weights and of the keys and values that are read.
        """
        (logits,) = self.run_all([batch])
        return logits

    def run_all(self, batches: Sequence[DecoderBatch]) -> list[Tensor]:
        """``run`` of several that have nothing to do with each other: neither blocks nor slots.

        If they are as many as the library has threads, each thread takes whole ones, and none waits for another between
        two operations. A token's result has the same bits either way.

        Raises: as ``run``.
        """
        function = library("run_decoder", self._dtype)
        if function is None:
            raise KernelInputError("the compiled library was unloaded")
        size = self._struct.lm_head.num_outputs or self._struct.hidden_size
        logits = [torch.empty(len(batch.logit_rows), size) for batch in batches]
        made = [self._step_of(*both) for both in zip(batches, logits, strict=True)]
        steps = (StepStruct * len(made))(*made)
        with torch.profiler.record_function("penstock::decoder"):
            function(ctypes.byref(self._struct), steps, len(made))
        return logits

    def _step_of(self, batch: DecoderBatch, logits: Tensor) -> StepStruct:
        for name in ("token_ids", "positions", "slot_mapping", "block_table", "query_lens", "seq_lens", "logit_rows"):
            tensor: Tensor = getattr(batch, name)
            if tensor.dtype != torch.int64 or not tensor.is_contiguous():
                raise KernelInputError(f"{name} must be int64 and contiguous, got {tensor.dtype} {tensor.stride()}")
        if batch.slot_mapping.numel() < self._num_groups * len(batch.token_ids) or (
            batch.block_table.numel() < self._num_groups * len(batch.query_lens) * batch.block_table.shape[-1]
        ):
            raise KernelInputError(
                f"the layers are in {self._num_groups} groups, of each of which slots and a table are needed; got "
                f"{tuple(batch.slot_mapping.shape)} and {tuple(batch.block_table.shape)}"
            )
        if any(of.dtype != torch.float32 or not of.is_contiguous() for pair in batch.angles for of in pair):
            raise KernelInputError("angles must be float32 and contiguous")
        angles = (AnglesStruct * len(batch.angles))(
            *(AnglesStruct(cos.data_ptr(), sin.data_ptr(), cos.shape[1]) for cos, sin in batch.angles)
        )
        return StepStruct(
            *(len(batch.token_ids), len(batch.query_lens), len(batch.logit_rows)),
            *(batch.token_ids.data_ptr(), batch.positions.data_ptr(), batch.slot_mapping.data_ptr()),
            *(address(batch.inputs_embeds), angles),
            *(batch.block_table.data_ptr(), batch.block_table.shape[-1]),
            *(batch.query_lens.data_ptr(), batch.seq_lens.data_ptr(), batch.logit_rows.data_ptr(), logits.data_ptr()),
            *self._adapters_of(batch),
            address(_checked_ends(batch)),
            *self._states_of(batch),
        )

    def _states_of(self, batch: DecoderBatch) -> tuple[int | None, int | None]:
        """The last fields of a step."""
        if not self._mixers:
            return None, None
        if batch.states is None or len(self._states) != len(self._mixers):
            raise KernelInputError("layers keep states: use_states has to come first, and a batch has to name them")
        return batch.states.reads.data_ptr(), batch.states.writes.data_ptr()

    def _adapters_of(self, batch: DecoderBatch) -> tuple[int | None, int | None, int]:
        """The fields of a step before those of states."""
        token_lora, adapters = batch.token_lora, self._adapters
        if token_lora is None:
            return None, None, 0
        is_known = (
            token_lora.dtype == torch.int64 and token_lora.is_contiguous() and len(token_lora) == len(batch.token_ids)
        )
        if adapters is None or not is_known:
            raise KernelInputError(
                f"token_lora must be int64 [{len(batch.token_ids)}] after use_adapters, got {token_lora.dtype} "
                f"{tuple(token_lora.shape)}"
            )
        return token_lora.data_ptr(), ctypes.addressof(adapters.products), adapters.num_slots


def _checked_ends(batch: DecoderBatch) -> Tensor | None:
    ends = batch.visible_ends
    if ends is None:
        return None
    if ends.dtype != torch.int64 or not ends.is_contiguous() or len(ends) != len(batch.token_ids):
        raise KernelInputError(f"visible_ends must be int64 [{len(batch.token_ids)}], got {ends.dtype} {ends.shape}")
    return ends
