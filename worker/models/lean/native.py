"""The lean path in one call of the compiled library, and its weights in the library's layout."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.decoder import (
    Decoder,
    DecoderBatch,
    DecoderWeights,
    ExpertsWeights,
    HeadsShape,
    LayerAdapters,
    LayerWeights,
    NormWeights,
    can_cache,
    can_decode,
)
from ....kernels.decoder import EmbeddingPart as EmbeddingPartWeights
from ....kernels.decoder import LayerEmbeddings as LayerEmbeddingsWeights
from ....kernels.gated_activation import ACTIVATIONS
from ....kernels.huge_pages import Arena
from ....kernels.linear import PackedWeight
from ..attention.page_layout import PageLayout
from ..attention.pages import use_pages
from ..forward import Forward, ModelInput
from ..placing.packed_linear import OwnPackedLinear
from .forward import LeanForward, LeanWrapper
from .layers.decoder import LayerEmbeddings, LeanDecoder
from .layers.feed_forward import GatedMlp, RoutedMlp
from .layers.layer import AnyLayer, EmbeddingPart, HeadNorm, LeanLayer, RowNorm
from .layers.mixing import MixingLayer
from .layers.norms import CentredNorm, NoNorm, Norm
from .staged import StagedForward

_FIRST_NUM_ANGLES = 512


class NativeForward(LeanWrapper):
    """A ``forward.Forward`` that computes a lean one in the compiled library, on the same weights.

    For a stage of a pipeline, ``run`` returns hidden states instead of logits, and takes those of the stage before as
    ``inputs_embeds``.

    Raises:
        KernelInputError: ``is_native`` is False.
    """

    def __init__(self, lean: LeanForward) -> None:
        super().__init__(lean)
        for call in lean.attention_calls:
            call.caches = None  # release those of earlier runs
        self._cache = _no_cache(lean)
        self._adapters: LayerAdapters | None = None
        self._bind_weights()
        self._angles = self._make_angles(min(_FIRST_NUM_ANGLES, lean.max_model_len))

    def allocate(self, num_blocks: int, block_size: int, num_slots: int, device: torch.device) -> None:
        num_layers = len(self.network.layers)
        use_pages(self.attention_calls, None)
        sources = [_source_of(layer) for layer in _layers_of(self.network)]
        places = [index if source is None else source for index, source in enumerate(sources)]
        self._allocate(num_blocks, block_size, num_slots, device, places, [0] * num_layers)

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
        """Allocate caches, and give each layer the cache of its place and the block table of its group."""
        self._cache = _no_cache(self.lean)  # release the earlier one first
        self._decoder.use_cache(*self._cache)
        dtype = self.attention_calls[0].cache_format.dtype
        # Layers that keep states instead have no keys and values.
        shapes = {
            place: self._decoder.cache_shape(num_blocks, block_size, index, dtype)
            for index, (place, layer) in enumerate(zip(places, self.network.layers, strict=True))
            if isinstance(layer, LeanLayer)
        }
        keys, values = _interleaved(shapes, max(places) + 1, dtype)
        self._cache = [keys[place] for place in places], [values[place] for place in places], block_size, groups
        self._decoder.use_cache(*self._cache)
        self.lean.states.allocate(num_slots, device)
        self._decoder.use_states(self.lean.states.states)

    def run(self, step: ModelInput) -> Tensor:
        if self._bound_weights() is not self.network.embed_tokens.weight:
            self._bind_weights()
        batch = step.batch
        tables = batch.block_table if batch.group_tables is None else batch.group_tables
        max_seq_len = max(batch.seq_lens)
        if max_seq_len > self._num_angles:
            self._angles = self._make_angles(max(max_seq_len, min(2 * max_seq_len, self.lean.max_model_len)))
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
                states=self.lean.states.begin(step) if self.keeps_state else None,
            )
        )

    def use_adapters(self, adapters: LayerAdapters) -> None:
        """Use ``adapters`` for ``token_lora`` from now on."""
        self._adapters = adapters
        self._decoder.use_adapters(adapters)

    @property
    def caches(self) -> list[Tensor]:
        """Keys and values of all attention layers, in the library's layout; a shared cache is listed once."""
        keys, values, *_ = self._cache
        return list({id(cache): cache for cache in keys + values if cache.ndim > 2}.values())

    def renew(self) -> None:
        """Read weights and windows from the lean forward again."""
        self._bind_weights()

    def _bind_weights(self) -> None:
        """Bind the weights at their current addresses, which change when the model sleeps and wakes."""
        self._decoder = Decoder(weights_of(self.lean))
        self._decoder.use_cache(*self._cache)
        self._decoder.use_adapters(self._adapters)
        if self.lean.states.states:
            self._decoder.use_states(self.lean.states.states)
        self._bound_weights = weakref.ref(self.network.embed_tokens.weight)

    def _make_angles(self, num_positions: int) -> list[tuple[Tensor, Tensor]]:
        """Compute cosines and sines ``[P, R]`` of all positions once, for each kind of angles, by the model's own code.

        Not beyond ``max_model_len``, since some kinds of RoPE change all angles when a position exceeds their original
        length.
        """
        self._num_angles = num_positions
        angles = self.network.angles(self.network.embed_tokens.weight, torch.arange(num_positions))
        return [(cos.float().contiguous(), sin.float().contiguous()) for cos, sin in angles]


def _interleaved(
    shapes: Mapping[int, tuple[int, int, int]], num_places: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Return keys and values of each place, ``[NB, KVH, size]``; empty tensors for a place without a shape.

    The parts of a block are adjacent. So blocks in use fill huge pages; the first blocks of one tensor per layer would
    take a huge page each.
    """
    sizes = [math.prod(shapes[place][1:]) if place in shapes else 0 for place in range(num_places)]
    num_blocks = max((shape[0] for shape in shapes.values()), default=0)
    blocks = Arena().zeros((num_blocks, 2 * sum(sizes)), dtype)
    parts = [
        part.unflatten(1, shapes[index // 2][1:]) if index // 2 in shapes else part
        for index, part in enumerate(blocks.split([size for size in sizes for _ in range(2)], dim=1))
    ]
    return parts[::2], parts[1::2]


def _no_cache(lean: LeanForward) -> tuple[list[Tensor], list[Tensor], int, Sequence[int]]:
    nothing = [torch.empty(0) for _ in lean.network.layers]
    return nothing, nothing, 0, [0] * len(nothing)


def make_native(forward: Forward, block_size: int) -> Forward:
    """Return a forward that computes ``forward``, whose layers are packed, in one call; ``forward`` itself if none
    can. A stage computes its layers in one call.
    """
    if not can_cache(block_size):
        return forward
    if isinstance(forward, StagedForward) and is_native(forward.lean):
        forward.layers = NativeForward(forward.lean)
    return NativeForward(forward) if isinstance(forward, LeanForward) and is_native(forward) else forward


def is_native(lean: LeanForward) -> bool:
    """Whether the compiled library can run the model.

    All its linear layers must be packed by us.
    """
    network = lean.network
    dtype = network.embed_tokens.weight.dtype
    products = _layer_products_of(network) if _is_stage(lean) else products_of(network)
    return (
        all(can_decode(dtype, layer.head_dim) for layer in _attending_layers_of(network))
        and all(isinstance(linear, OwnPackedLinear) for linear in products)
        and any(layer.mlp is not None for layer in _layers_of(network))
    )


def products_of(network: LeanDecoder) -> list[object]:
    """Return all linear layers of ``network``; None for a part that only Python can compute."""
    of_all = network.layer_embeddings
    products = [network.lm_head, *_layer_products_of(network)]
    return products if of_all is None else [*products, of_all.projection]


def _is_stage(lean: LeanForward) -> bool:
    """Return whether ``lean`` has the layers of a stage, which computes the head by itself."""
    return lean.groups is not None and lean.groups.layout.pipeline > 1


def _layer_products_of(network: LeanDecoder) -> list[object]:
    return [linear for layer in _layers_of(network) for linear in _linears_of(layer)]


def _layers_of(network: LeanDecoder) -> list[AnyLayer]:
    return [layer for layer in network.layers if isinstance(layer, AnyLayer)]


def _attending_layers_of(network: LeanDecoder) -> list[LeanLayer]:
    return [layer for layer in network.layers if isinstance(layer, LeanLayer)]


def _linears_of(layer: AnyLayer) -> list[object]:
    """Return the linear layers of ``layer``; None for a feed-forward part that only Python can compute."""
    linears = [] if layer.plan.attention is None else [layer.in_proj, layer.o_proj]
    if layer.embedding_part is not None:
        linears += [layer.embedding_part.gate, layer.embedding_part.output]
    mlp = layer.mlp
    if isinstance(mlp, RoutedMlp):
        shared = [] if mlp.shared is None else [mlp.shared.gate_up_proj, mlp.shared.down_proj]
        gate = [] if mlp.shared_gate is None else [mlp.shared_gate]
        return [*linears, *mlp.gate_up, *mlp.down, *shared, *gate]
    dense = [mlp.gate_up_proj, mlp.down_proj] if isinstance(mlp, GatedMlp) else [] if mlp is None else [None]
    return [*linears, *dense]


def _source_of(layer: AnyLayer) -> int | None:
    """Return the layer whose keys and values ``layer`` attends to; None for its own."""
    return layer.attention.source if isinstance(layer, LeanLayer) else None


def weights_of(lean: LeanForward) -> DecoderWeights:
    """Return all weights of ``lean``, whose linear layers are packed."""
    network, plan = lean.network, lean.network.plan
    first = next(layer for layer in network.layers if isinstance(layer, LeanLayer))
    final_norm, layer_embeddings = _norm_weights(network.norm), network.layer_embeddings
    assert final_norm is not None
    groups = lean.groups
    is_first, is_last = groups is None or groups.is_first_stage, groups is None or groups.is_last_stage
    lm_head = None if _is_stage(lean) else _packed_weight(network.lm_head)
    return DecoderWeights(
        embeddings=network.embed_tokens.weight,
        layers=tuple(_all_layer_weights(lean)),
        final_norm=final_norm if is_last else None,
        lm_head=lm_head,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        token_scale=plan.embedding_scale,
        stream_scale=plan.stream_scale if is_first else 1.0,
        logit_scale=plan.logit_scale,
        logit_softcap=plan.logit_softcap,
        layer_embeddings=None if layer_embeddings is None else _layer_embeddings(layer_embeddings),
        embeds_by_head=plan.ties_head and lm_head is not None and lm_head.blocks is not None,
    )


def _all_layer_weights(lean: LeanForward) -> Iterator[LayerWeights]:
    windows = iter(lean.windows)
    for layer in lean.network.layers:
        assert isinstance(layer, AnyLayer)
        common = _common_weights(layer)
        if isinstance(layer, LeanLayer):
            yield LayerWeights(**common, **_attention_weights(layer, next(windows)))
        else:
            mixer = layer.weights if isinstance(layer, MixingLayer) else None
            yield LayerWeights(**common, query_norm=None, key_norm=None, scale=1.0, window=None, mixer=mixer)


def _layer_embeddings(embeddings: LayerEmbeddings) -> LayerEmbeddingsWeights:
    plan = embeddings.plan
    return LayerEmbeddingsWeights(
        table=embeddings.embedding.weight,
        projection=_packed_weight(embeddings.projection),
        norm=_norm_weights(embeddings.norm),
        size=plan.size,
        table_scale=plan.embedding_scale,
        projection_scale=plan.projection_scale,
        sum_scale=plan.sum_scale,
    )


def _common_weights(layer: AnyLayer) -> dict[str, Any]:
    routed = layer.mlp if isinstance(layer.mlp, RoutedMlp) else None
    mlp = layer.mlp if routed is None else routed.shared
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
        "experts": None if routed is None else _experts_weights(routed),
        "embedding_part": None if layer.embedding_part is None else _embedding_part(layer.embedding_part),
        "out_scale": layer.out_scale,
    }


def _embedding_part(part: EmbeddingPart) -> EmbeddingPartWeights:
    return EmbeddingPartWeights(
        gate=_packed_weight(part.gate),
        output=_packed_weight(part.output),
        norm=_norm_weights(part.norm),
        activation=ACTIVATIONS.index(part.plan.activation),
    )


def _experts_weights(mlp: RoutedMlp) -> ExpertsWeights:
    plan, router = mlp.plan, mlp.router
    return ExpertsWeights(
        router=router.weight,
        router_bias=router.bias,
        choice_bias=router.choice_bias,
        gate_up=[_packed_weight(linear) for linear in mlp.gate_up],
        down=[_packed_weight(linear) for linear in mlp.down],
        num_chosen=plan.router.num_chosen,
        has_sigmoids=plan.router.scoring == "sigmoid",
        renormalizes=plan.router.renormalizes,
        rounds_logits=not plan.router.is_wide,
        rounds_weights=plan.router.rounds_weights,
        scale=plan.router.scale,
        activation=ACTIVATIONS.index(plan.activation),
        is_gated=plan.is_gated,
        clamp=plan.clamp,
        shared_gate=None if mlp.shared_gate is None else _packed_weight(mlp.shared_gate),
        input_norm=_norm_weights(mlp.input_norm),
        router_norm=_norm_weights(router.norm),
        input_scale=router.input_scale,
        input_factor=plan.router.input_factor,
        expert_scale=router.expert_scale,
        out_norm=_norm_weights(mlp.out_norm),
        shared_norm=_norm_weights(mlp.shared_norm),
    )


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
        "gate": attention.gate,
        "heads": HeadsShape(layer.num_heads, layer.num_kv_heads, layer.head_dim),
        "stores": attention.source is None,
        "values_are_keys": attention.values_are_keys,
        "value_norm": _norm_of_heads(layer.value_norm, layer.value_norm.weight)
        if isinstance(layer.value_norm, HeadNorm)
        else None,
    }


def _head_norms(layer: LeanLayer) -> tuple[NormWeights | None, NormWeights | None]:
    norm = layer.head_norm
    if isinstance(norm, RowNorm):
        return _norm_weights(norm.query), _norm_weights(norm.key)
    if not isinstance(norm, HeadNorm):
        return None, None
    query, key = norm.weight.detach().tensor_split([layer.num_heads])
    return _norm_of_heads(norm, query), _norm_of_heads(norm, key) if len(key) else None


def _norm_of_heads(norm: HeadNorm, weight: Tensor) -> NormWeights:
    return NormWeights(weight, norm.eps, norm.is_centred)


def _norm_weights(norm: nn.Module) -> NormWeights | None:
    if isinstance(norm, NoNorm):
        return None
    assert isinstance(norm, Norm | CentredNorm)
    return NormWeights(norm.weight, norm.eps, isinstance(norm, CentredNorm), norm.bias)


def _packed_weight(linear: object) -> PackedWeight:
    assert isinstance(linear, OwnPackedLinear)
    return linear.packed_weight
