"""An encoder in one call of the compiled library: a decoder whose tokens attend to their whole text.

Keys and values are written to a cache, as in a decoder, because attention reads them in that layout. The cache is as
large as one call needs, all layers use the same one, and nothing is kept in it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from ....kernels import native
from ....kernels.decoder import (
    Decoder,
    DecoderBatch,
    DecoderWeights,
    LayerAdapters,
    LayerWeights,
    NormWeights,
    can_decode,
)
from ....kernels.gated_activation import ACTIVATIONS
from ....kernels.huge_pages import Arena
from ....kernels.linear import PackedWeight
from ....shared.errors import ModelLoadError
from ..lean.layers.norms import CentredNorm, Norm, make_norm
from ..lean.layers.rotation import angles_of
from ..modes.packed import install_attention
from ..placing.packed_linear import OwnPackedLinear, concatenate_outputs, pack_adjacent
from ..plan import NormPlan
from .encoder import EncoderForward, EncoderReference, Texts
from .encoder_plan import EncoderLayerPlan, EncoderPlan, names_of_linears, read_encoder
from .pooler import with_parts

log = structlog.get_logger(__name__)

_BLOCK_SIZE = 16
# Tokens of whole texts for one thread: the values between two products of this many fit in its second-level cache.
_TOKENS_PER_PIECE = 512
_ENOUGH_TOKENS = 1024
# Relative to the mean. If a piece is larger, all threads work on each piece together, because otherwise some would
# wait.
_LARGEST_PIECE = 1.2
_FIRST_NUM_ANGLES = 512


class CompiledEncoder(EncoderForward):
    """An ``EncoderForward`` on the same weights, whose linear layers must be packed.

    Args:
        plan: structure of its layers.
    """

    attention_backend = "native"
    enough_tokens = _ENOUGH_TOKENS

    def __init__(self, encoder: EncoderForward, plan: EncoderPlan) -> None:
        super().__init__(encoder.network, encoder.attention, encoder.first_position)
        self.plan = plan
        self._num_angles = 0
        self._num_blocks = 0
        self._adapters: LayerAdapters | None = None
        self._bind_weights()

    def _states(self, texts: Texts, rows: Tensor) -> Tensor:
        if self._bound_weights() is not self._embedding.weight:
            self._bind_weights()
        self.attention.begin(texts.lens)
        embedded = self._run_base(self._stem, texts)
        pieces = cut_pieces(texts.lens, native.num_threads())
        self._reserve(sum(int(piece.num_blocks.sum()) for piece in pieces), max(texts.lens))
        batches, first_block = list[DecoderBatch](), 0
        for piece in pieces:
            batches.append(self._batch(embedded, texts, piece, rows, first_block))
            first_block += int(piece.num_blocks.sum())
        if max(len(piece) for piece in pieces) * len(pieces) <= _LARGEST_PIECE * sum(texts.lens):
            parts = self._decoder.run_all(batches)
        else:
            parts = [self._decoder.run(batch) for batch in batches]
        return torch.cat(parts).to(embedded.dtype)

    def use_adapters(self, adapters: LayerAdapters) -> None:
        """Use ``adapters`` for ``token_lora`` from now on."""
        self._adapters = adapters
        self._decoder.use_adapters(adapters)

    def _batch(self, embedded: Tensor, texts: Texts, piece: Piece, rows: Tensor, first_block: int) -> DecoderBatch:
        """Return those of ``piece`` as a batch, whose blocks begin with ``first_block``, with its part of
        ``rows``.
        """
        lens, num_blocks = piece.lens, piece.num_blocks
        first_blocks = first_block + np.cumsum(num_blocks) - num_blocks
        all_rows = rows.numpy()
        first, last = np.searchsorted(all_rows, (piece.start, piece.end))
        positions = texts.positions[piece.start : piece.end]
        table = first_blocks[:, None] + np.arange(num_blocks.max())
        seq_lens = torch.from_numpy(lens)
        return DecoderBatch(
            token_ids=positions,  # not used, since embeddings are passed
            positions=positions,
            slot_mapping=positions + torch.from_numpy(np.repeat(first_blocks * _BLOCK_SIZE, lens)),
            block_table=torch.from_numpy(table),
            query_lens=seq_lens,
            seq_lens=seq_lens,
            logit_rows=torch.from_numpy(all_rows[first:last] - piece.start),
            angles=self._angles,
            inputs_embeds=embedded[piece.start : piece.end].contiguous(),
            token_lora=None if texts.token_lora is None else texts.token_lora[piece.start : piece.end],
            visible_ends=torch.from_numpy(np.repeat(lens, lens)),
        )

    def _reserve(self, num_blocks: int, longest: int) -> None:
        """Allocate keys and values for this many blocks, and angles for texts of that length."""
        if num_blocks > self._num_blocks:
            self._num_blocks = num_blocks
            shape = self._decoder.cache_shape(num_blocks, _BLOCK_SIZE)
            dtype = self._embedding.weight.dtype
            self._keys, self._values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
            self._use_cache()
        if longest > self._num_angles:
            self._num_angles = max(longest, min(2 * longest, self.max_text_len or longest), _FIRST_NUM_ANGLES)
            self._angles = self._make_angles()

    def _use_cache(self) -> None:
        layers = len(self.plan.layers)
        self._decoder.use_cache([self._keys] * layers, [self._values] * layers, _BLOCK_SIZE)

    def _make_angles(self) -> list[tuple[Tensor, Tensor]]:
        """Compute the angles of each kind by the model's own code."""
        base = self.network.base_model
        positions = torch.arange(self._num_angles) + self.first_position
        angles = (
            angles_of(base.get_submodule(plan.name), plan, self._embedding.weight, positions)
            for plan in self.plan.angles
        )
        return [(cos.float().contiguous(), sin.float().contiguous()) for cos, sin in angles]

    def _bind_weights(self) -> None:
        """Bind the weights at their current addresses, which change when the model sleeps and wakes."""
        base: Any = self.network.base_model
        plan = self.plan
        self._embedding: Any = base.get_input_embeddings()
        parts: dict[str, nn.Module] = {plan.layers_name: nn.ModuleList()}
        if plan.norm is not None:
            parts[plan.norm.name] = nn.Identity()
        self._stem = with_parts(base, parts)
        weights = _weights_of(base, plan)
        self._decoder = Decoder(weights)
        self._decoder.use_adapters(self._adapters)
        # The decoder holds addresses only. Packed tensors are held by the modules, which may release them.
        self._referenced = list(_unpacked_tensors(weights))
        self._angles: list[tuple[Tensor, Tensor]] = []
        self._num_angles = 0
        if self._num_blocks:
            self._use_cache()
        self._bound_weights = weakref.ref(self._embedding.weight)


class Piece:
    """Tokens from ``start`` to ``end``, the length of each of their texts, and the blocks that it takes."""

    def __init__(self, start: int, lens: Sequence[int]) -> None:
        self.start, self.end = start, start + sum(lens)
        self.lens = np.array(lens)
        self.num_blocks = -(-self.lens // _BLOCK_SIZE)

    def __len__(self) -> int:
        return self.end - self.start


def cut_pieces(lens: Sequence[int], num_threads: int) -> list[Piece]:
    """Cut texts of ``lens`` tokens into pieces of about equal size, whose number is a multiple of ``num_threads`` if
    possible.
    """
    ends = np.cumsum(lens)
    num_pieces = num_threads * -(-int(ends[-1]) // (num_threads * _TOKENS_PER_PIECE))
    # After the text whose end is nearest to the intended end of a piece.
    targets = ends[-1] * np.arange(1, num_pieces) / num_pieces
    cut_after = np.abs(ends[None] - targets[:, None]).argmin(1) + 1
    cuts = [0, *sorted(set(cut_after.tolist()) - {len(lens)}), len(lens)]
    return [Piece(sum(lens[:start]), lens[start:end]) for start, end in itertools.pairwise(cuts)]


def plan_of(forward: EncoderForward, architecture: str, quantization: str | None) -> EncoderPlan | None:
    """Return the plan by which the compiled library can compute ``forward``; None if it cannot, which is logged.

    Linear layers whose outputs are needed concatenated are packed for it, each in its place in the model; the others
    must be packed afterwards.
    """
    base: Any = forward.network.base_model
    try:
        plan = read_encoder(base, forward.max_text_len, forward.first_position)
        _check_shape(plan, base.dtype)
        _pack_in_rows(base, plan, quantization)
    except Exception as error:  # any exception of the architecture's own code when it runs a few tokens
        log.info("encoder_not_compiled", architecture=architecture, why=str(error))
        return None
    finally:
        install_attention(forward.network, forward.attention.name)
    return plan


def compile_encoder(
    forward: EncoderForward, plan: EncoderPlan, reference: EncoderReference, tolerance: float | None, architecture: str
) -> EncoderForward:
    """Return a forward that computes by ``plan``; ``forward`` if its results differ from the model itself."""
    try:
        compiled = CompiledEncoder(forward, plan)
        error = reference.error_of(compiled)
        if error <= reference.limit(tolerance):
            return compiled
        reason = f"its hidden states would differ by {error:.1%}"
    except Exception as raised:  # any exception of the architecture's own code without its layers
        reason = f"{type(raised).__name__}: {raised}"
    log.info("encoder_not_compiled", architecture=architecture, why=reason)
    return forward


def _check_shape(plan: EncoderPlan, dtype: torch.dtype) -> None:
    shapes = {
        (layer.attention.num_heads, layer.attention.num_kv_heads, layer.attention.head_dim) for layer in plan.layers
    }
    if len(shapes) > 1:
        raise ModelLoadError("its layers have heads of different shapes")
    ((*_, head_dim),) = shapes
    if not can_decode(dtype, head_dim):
        raise ModelLoadError(f"there is no compiled loop for heads of {head_dim} in {dtype} here")


def _pack_in_rows(base: Any, plan: EncoderPlan, quantization: str | None) -> None:
    arena = Arena()
    for names in names_of_linears(plan):
        packed = pack_adjacent({name: base.get_submodule(name) for name in names}, quantization, arena)
        if packed is None:
            raise ModelLoadError(f"{', '.join(names)} cannot be packed side by side")
        for name, linear in zip(names, packed, strict=True):
            base.set_submodule(name, linear)


def _weights_of(base: Any, plan: EncoderPlan) -> DecoderWeights:
    norms = [
        tuple(_norm_weights(base, norm) for norm in (layer.attention_norm, layer.mlp_norm)) for layer in plan.layers
    ]
    final = _norm_weights(base, plan.norm)
    if plan.norms_follow:
        # The library counts each norm as the one before the next part.
        in_order = [None, *itertools.chain.from_iterable(norms)]
        norms, final = list(zip(in_order[0:-1:2], in_order[1::2], strict=True)), in_order[-1]
    first = plan.layers[0]
    attention, output = first.attention, base.get_submodule(first.attention.output)
    return DecoderWeights(
        # The model's own code computes embeddings, and sometimes from narrower ones.
        embeddings=torch.empty(0, output.out_features, dtype=base.get_input_embeddings().weight.dtype),
        layers=tuple(_layer_weights(base, *norms_of_layer) for norms_of_layer in zip(plan.layers, norms, strict=True)),
        final_norm=final,
        lm_head=None,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        norms_stream=plan.norms_follow,
    )


def _layer_weights(base: nn.Module, plan: EncoderLayerPlan, norms: tuple[NormWeights | None, ...]) -> LayerWeights:
    attention, mlp, window = plan.attention, plan.mlp, plan.window
    rotation = attention.rotation
    return LayerWeights(
        *norms,
        query_norm=None,
        key_norm=None,
        qkv=_concatenated(base, attention.qkv),
        output=_concatenated(base, (attention.output,)),
        gate_up=_concatenated(base, mlp.inner),
        down=_concatenated(base, (mlp.down,)),
        scale=attention.scale,
        window=None if window is None else window + 1,
        ahead=window,
        angles=None if rotation is None else rotation.source,
        is_interleaved=rotation is not None and rotation.is_interleaved,
        activation=ACTIVATIONS.index(mlp.activation),
        is_gated=mlp.kind == "gated",
    )


def _unpacked_tensors(weights: DecoderWeights) -> Iterator[Tensor | None]:
    """Yield the tensors of ``weights`` that are not packed weights of modules."""
    yield weights.embeddings
    norms = [weights.final_norm]
    for layer in weights.layers:
        norms += [layer.input_norm, layer.mlp_norm]
        for packed in (layer.qkv, layer.output, layer.gate_up, layer.down):
            if packed is not None:
                yield from (packed.bias, packed.scales, packed.offsets)
    for norm in norms:
        if norm is not None:
            yield from (norm.weight, norm.bias)


def _concatenated(base: nn.Module, names: tuple[str, ...]) -> PackedWeight:
    linears = [base.get_submodule(name) for name in names]
    return concatenate_outputs([linear for linear in linears if isinstance(linear, OwnPackedLinear)])


def _norm_weights(base: Any, plan: NormPlan | None) -> NormWeights | None:
    if plan is None:
        return None
    norm = make_norm(base.get_submodule(plan.name), plan, base.device)
    assert isinstance(norm, Norm | CentredNorm)
    return NormWeights(norm.weight, norm.eps, plan.is_centred, norm.bias)
