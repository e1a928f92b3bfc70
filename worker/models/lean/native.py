"""The lean path in one call of the compiled library."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.decoder import (
    Decoder,
    DecoderBatch,
    DecoderWeights,
    LayerAdapters,
    LayerWeights,
    NormWeights,
    can_cache,
    can_decode,
)
from ....kernels.gated_activation import ACTIVATIONS
from ....kernels.linear import PackedWeight
from ..cache.page_layout import PageLayout
from ..cache.paged_tensor import zeros
from ..cache.pages import use_pages
from ..forward import Forward, ModelInput
from ..packed_linear import OwnPackedLinear
from .decoder import LeanDecoder
from .feed_forward import GatedMlp
from .forward import LeanForward
from .layer import AnyLayer, HeadNorm, LeanLayer, RowNorm
from .mixing import MixingLayer
from .norms import CentredNorm, NoNorm, Norm
from .of_lean import OfLean
from .plan import GATES

_FIRST_NUM_ANGLES = 512


class NativeForward(OfLean):
    """See ``forward.Forward``: what a lean one computes, on the same weights.

    Raises:
        KernelInputError: ``is_native`` says no.
    """

    def __init__(self, lean: LeanForward) -> None:
        super().__init__(lean)
        self._cache = _no_cache(lean)
        self._adapters: LayerAdapters | None = None
        self._take_weights()
        self._angles = self._make_angles(min(_FIRST_NUM_ANGLES, lean.max_model_len))

    def allocate(self, num_blocks: int, block_size: int, num_slots: int, device: torch.device) -> None:
        num_layers = len(self.network.layers)
        use_pages(self.attention_calls, None)
        self._allocate(num_blocks, block_size, num_slots, device, range(num_layers), [0] * num_layers)

    def allocate_pages(
        self, layout: PageLayout, num_pages: int, block_size: int, num_slots: int, device: torch.device
    ) -> None:
        """See ``pages.PagedByGroups``."""
        use_pages(self.attention_calls, layout)
        self._allocate(num_pages, block_size, num_slots, device, layout.places, layout.groups)

    def _allocate(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        device: torch.device,
        places: Sequence[int],
        groups: Sequence[int],
    ) -> None:
        """Give each layer the cache of its place, and the table of its group."""
        self._cache = _no_cache(self._lean)  # first let go of what was
        self._decoder.use_cache(*self._cache)
        shape, dtype = self._decoder.cache_shape(num_blocks, block_size), self.network.embed_tokens.weight.dtype
        # Layers that keep states instead have no keys and values.
        attending = {
            place for place, layer in zip(places, self.network.layers, strict=True) if isinstance(layer, LeanLayer)
        }
        nothing = torch.empty(0, dtype=dtype)
        keys, values = (
            [zeros(shape, dtype, device) if place in attending else nothing for place in range(max(places) + 1)]
            for _ in range(2)
        )
        self._cache = [keys[place] for place in places], [values[place] for place in places], block_size, groups
        self._decoder.use_cache(*self._cache)
        self._lean.states.allocate(num_slots, device)
        self._decoder.use_states(self._lean.states.states)

    def run(self, step: ModelInput) -> Tensor:
        if self._weights_seen() is not self.network.embed_tokens.weight:
            self._take_weights()
        batch = step.batch
        tables = batch.block_table if batch.group_tables is None else batch.group_tables
        max_seq_len = max(batch.seq_lens)
        if max_seq_len > self._num_angles:
            self._angles = self._make_angles(max(max_seq_len, min(2 * max_seq_len, self._lean.max_model_len)))
        return self._decoder.run(
            DecoderBatch(
                token_ids=step.token_ids,
                positions=step.positions,
                slot_mapping=batch.slot_mapping if batch.group_slots is None else batch.group_slots,
                block_table=tables.to(torch.int64).contiguous(),
                query_lens=torch.tensor(batch.query_lens),
                seq_lens=torch.tensor(batch.seq_lens),
                logit_rows=step.logit_rows,
                angles=self._angles,
                inputs_embeds=step.inputs_embeds,
                token_lora=step.token_lora,
                visible_ends=batch.visible_ends,
                states=self._lean.states.begin(step) if self.keeps_state else None,
            )
        )

    def use_adapters(self, adapters: LayerAdapters) -> None:
        """From now on ``token_lora`` of a step means these."""
        self._adapters = adapters
        self._decoder.use_adapters(adapters)

    @property
    def caches(self) -> list[Tensor]:
        """Keys and values of all layers that attend, as the library lays them out; those that layers share once."""
        keys, values, *_ = self._cache
        return list({id(cache): cache for cache in keys + values if cache.ndim > 1}.values())

    def renew(self) -> None:
        """Take weights and windows from the lean one as they are now."""
        self._take_weights()

    def _take_weights(self) -> None:
        """At the start, and after the model has slept: then its weights lie elsewhere."""
        self._decoder = Decoder(_weights_of(self._lean))
        self._decoder.use_cache(*self._cache)
        self._decoder.use_adapters(self._adapters)
        if self._lean.states.states:
            self._decoder.use_states(self._lean.states.states)
        self._weights_seen = weakref.ref(self.network.embed_tokens.weight)

    def _make_angles(self, num_positions: int) -> list[tuple[Tensor, Tensor]]:
        """Cosines and sines ``[P, R]`` by each of the model's ways, made by its own code once for every position.

        Not beyond ``max_model_len``: some RoPE changes all angles once a position is beyond what it was made for.
        """
        self._num_angles = num_positions
        made = self.network.angles(self.network.embed_tokens.weight, torch.arange(num_positions))
        return [(cos.float().contiguous(), sin.float().contiguous()) for cos, sin in made]


def _no_cache(lean: LeanForward) -> tuple[list[Tensor], list[Tensor], int, Sequence[int]]:
    nothing = [torch.empty(0) for _ in lean.network.layers]
    return nothing, nothing, 0, [0] * len(nothing)


def make_native(forward: Forward, block_size: int) -> Forward:
    """Return ``forward``, its layers packed, or what computes the same in one call, where there is such a thing."""
    if isinstance(forward, LeanForward) and can_cache(block_size) and is_native(forward):
        return NativeForward(forward)
    return forward


def is_native(lean: LeanForward) -> bool:
    """Whether the compiled library can run the model.

    Its layers are to be dense and of one shape, and all its products packed by us.
    """
    network = lean.network
    layers = _attending_layers_of(network)
    linears = [network.lm_head, *(linear for layer in _layers_of(network) for linear in _linears_of(layer))]
    return (
        can_decode(network.embed_tokens.weight.dtype, layers[0].head_dim)
        and all(isinstance(linear, OwnPackedLinear) for linear in linears)
        and any(isinstance(layer.mlp, GatedMlp) for layer in _layers_of(network))
        and len({(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}) == 1
    )


def _layers_of(network: LeanDecoder) -> list[AnyLayer]:
    return [layer for layer in network.layers if isinstance(layer, AnyLayer)]


def _attending_layers_of(network: LeanDecoder) -> list[LeanLayer]:
    return [layer for layer in network.layers if isinstance(layer, LeanLayer)]


def _linears_of(layer: AnyLayer) -> list[object]:
    """Of attention two, and of the feed-forward part; a list with None is of one that is not dense."""
    of_attention = [] if layer.plan.attention is None else [layer.in_proj, layer.o_proj]
    mlp = layer.mlp
    of_mlp = [mlp.gate_up_proj, mlp.down_proj] if isinstance(mlp, GatedMlp) else [] if mlp is None else [None]
    return [*of_attention, *of_mlp]


def _weights_of(lean: LeanForward) -> DecoderWeights:
    network, plan = lean.network, lean.network.plan
    first, final_norm = _attending_layers_of(network)[0], _norm_weights(network.norm)
    assert final_norm is not None
    return DecoderWeights(
        embeddings=network.embed_tokens.weight,
        layers=tuple(_all_layer_weights(lean)),
        final_norm=final_norm,
        lm_head=_packed_weight(network.lm_head),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        token_scale=plan.embedding_scale,
        stream_scale=plan.stream_scale,
        logit_scale=plan.logit_scale,
        logit_softcap=plan.logit_softcap,
    )


def _all_layer_weights(lean: LeanForward) -> Iterator[LayerWeights]:
    windows = iter(lean.windows)
    for layer in _layers_of(lean.network):
        common = _common_weights(layer)
        if isinstance(layer, LeanLayer):
            yield LayerWeights(**common, **_attention_weights(layer, next(windows)))
        else:
            mixer = layer.weights if isinstance(layer, MixingLayer) else None
            yield LayerWeights(**common, query_norm=None, key_norm=None, scale=1.0, window=None, mixer=mixer)


def _common_weights(layer: AnyLayer) -> dict[str, Any]:
    mlp = layer.mlp
    assert mlp is None or isinstance(mlp, GatedMlp)
    has_attention = layer.plan.attention is not None
    return {
        "input_norm": _norm_weights(layer.input_norm),
        "mlp_norm": _norm_weights(layer.mlp_norm),
        "attention_norm": _norm_weights(layer.attention_norm),
        "mlp_out_norm": _norm_weights(layer.mlp_out_norm),
        "qkv": _packed_weight(layer.in_proj) if has_attention else None,
        "output": _packed_weight(layer.o_proj) if has_attention else None,
        "gate_up": None if mlp is None else _packed_weight(mlp.gate_up_proj),
        "down": None if mlp is None else _packed_weight(mlp.down_proj),
        "residual_scale": layer.plan.residual_scale,
        "is_parallel": layer.plan.is_parallel,
        "activation": 0 if mlp is None else ACTIVATIONS.index(mlp.activation),
        "is_gated": mlp is None or mlp.is_gated,
    }


def _attention_weights(layer: LeanLayer, window: int | None) -> dict[str, Any]:
    attention = layer.attention
    rotation = attention.rotation
    query_norm, key_norm = _head_norms(layer)
    return {
        "query_norm": query_norm,
        "key_norm": key_norm,
        "scale": layer.scale,
        "window": window,
        "norms_rows": attention.norms_rows,
        "norms_follow": attention.norms_follow,
        "angles": None if rotation is None else rotation.source,
        "is_interleaved": rotation is not None and rotation.is_interleaved,
        "softcap": attention.softcap,
        "sinks": layer.sinks,
        "gate": GATES.index(attention.gate),
    }


def _head_norms(layer: LeanLayer) -> tuple[NormWeights | None, NormWeights | None]:
    norm = layer.head_norm
    if isinstance(norm, RowNorm):
        return _norm_weights(norm.query), _norm_weights(norm.key)
    if not isinstance(norm, HeadNorm):
        return None, None
    query, key = norm.weight.detach().tensor_split([layer.num_heads])
    return NormWeights(query, norm.eps, norm.is_centred), NormWeights(key, norm.eps, norm.is_centred)


def _norm_weights(norm: nn.Module) -> NormWeights | None:
    if isinstance(norm, NoNorm):
        return None
    assert isinstance(norm, Norm | CentredNorm)
    return NormWeights(norm.weight, norm.eps, isinstance(norm, CentredNorm), norm.bias)


def _packed_weight(linear: object) -> PackedWeight:
    assert isinstance(linear, OwnPackedLinear)
    return linear.packed_weight
