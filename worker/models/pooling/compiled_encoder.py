"""An encoder in one call of the compiled library: a decoder whose tokens see their whole text.

Keys and values go through a cache as a decoder's do, since they lie there as attention wants them. It is as large as
what one call computes, all layers use the same, and nothing is left in it.
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
from ....kernels.decoder import Decoder, DecoderBatch, DecoderWeights, LayerWeights, NormWeights, can_decode
from ....kernels.gated_activation import ACTIVATIONS
from ....kernels.huge_pages import Arena
from ....kernels.linear import PackedWeight
from ....shared.errors import ModelLoadError
from ..checks.conformance import tolerance_of
from ..lean.layers.norms import CentredNorm, Norm, make_norm
from ..lean.layers.rotation import angles_of
from ..modes.packed import install_attention
from ..placing.packed_linear import OwnPackedLinear, pack_in_a_row, side_by_side
from ..plan import NormPlan
from .encoder import EncoderForward, EncoderReference, Texts
from .encoder_plan import EncoderLayerPlan, EncoderPlan, names_of_linears, read_encoder
from .pooler import with_parts

log = structlog.get_logger(__name__)

_BLOCK_SIZE = 16
# Of whole texts, for one thread: what is between two products of so many lies in its second cache.
_TOKENS_PER_PIECE = 512
_ENOUGH_TOKENS = 1024
# Over the mean; with larger ones all threads work on a piece together, or one would wait for the other.
_LARGEST_PIECE = 1.2
_FIRST_NUM_ANGLES = 512


class CompiledEncoder(EncoderForward):
    """See ``EncoderForward``: the same on the same weights, whose linear layers have to be packed."""

    attention_backend = "native"
    enough_tokens = _ENOUGH_TOKENS

    def __init__(self, of: EncoderForward, plan: EncoderPlan) -> None:
        super().__init__(of.network, of.attention, of.first_position)
        self._plan = plan
        self._num_angles = 0
        self._num_blocks = 0
        self._take_weights()

    def _states(self, texts: Texts, rows: Tensor) -> Tensor:
        if self._weights_seen() is not self._embedding.weight:
            self._take_weights()
        self.attention.begin(texts.lens)
        embedded = self._run(self._stem, texts)
        pieces = cut_pieces(texts.lens, native.num_threads())
        self._make_room(sum(int(piece.num_blocks.sum()) for piece in pieces), max(texts.lens))
        batches, first_block = list[DecoderBatch](), 0
        for piece in pieces:
            batches.append(self._batch(embedded, texts.positions, piece, rows, first_block))
            first_block += int(piece.num_blocks.sum())
        if max(len(piece) for piece in pieces) * len(pieces) <= _LARGEST_PIECE * sum(texts.lens):
            parts = self._decoder.run_all(batches)
        else:
            parts = [self._decoder.run(batch) for batch in batches]
        return torch.cat(parts).to(embedded.dtype)

    def _batch(self, embedded: Tensor, positions: Tensor, piece: Piece, rows: Tensor, first_block: int) -> DecoderBatch:
        """Of the texts of ``piece``, whose blocks begin with ``first_block``, and of those ``rows`` that are theirs."""
        lens, num_blocks = piece.lens, piece.num_blocks
        first_blocks = first_block + np.cumsum(num_blocks) - num_blocks
        wanted = rows.numpy()
        first, last = np.searchsorted(wanted, (piece.start, piece.end))
        positions = positions[piece.start : piece.end]
        table = first_blocks[:, None] + np.arange(num_blocks.max())
        seq_lens = torch.from_numpy(lens)
        return DecoderBatch(
            token_ids=positions,  # nobody's: embeddings are given
            positions=positions,
            slot_mapping=positions + torch.from_numpy(np.repeat(first_blocks * _BLOCK_SIZE, lens)),
            block_table=torch.from_numpy(table),
            query_lens=seq_lens,
            seq_lens=seq_lens,
            logit_rows=torch.from_numpy(wanted[first:last] - piece.start),
            angles=self._angles,
            inputs_embeds=embedded[piece.start : piece.end].contiguous(),
            visible_ends=torch.from_numpy(np.repeat(lens, lens)),
        )

    def _make_room(self, num_blocks: int, longest: int) -> None:
        """Keys and values for so many blocks, and angles for texts of that length."""
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
        layers = len(self._plan.layers)
        self._decoder.use_cache([self._keys] * layers, [self._values] * layers, _BLOCK_SIZE)

    def _make_angles(self) -> list[tuple[Tensor, Tensor]]:
        """By each of the model's ways, made by its own code."""
        base = self.network.base_model
        positions = torch.arange(self._num_angles) + self.first_position
        made = (
            angles_of(base.get_submodule(plan.name), plan, self._embedding.weight, positions)
            for plan in self._plan.angles
        )
        return [(cos.float().contiguous(), sin.float().contiguous()) for cos, sin in made]

    def _take_weights(self) -> None:
        """At the start, and after the model has slept: then its weights lie elsewhere."""
        base: Any = self.network.base_model
        plan = self._plan
        self._embedding: Any = base.get_input_embeddings()
        parts: dict[str, nn.Module] = {plan.layers_name: nn.ModuleList()}
        if plan.norm is not None:
            parts[plan.norm.name] = nn.Identity()
        self._stem = with_parts(base, parts)
        weights = _weights_of(base, plan)
        self._decoder = Decoder(weights)
        # It knows where they lie, and does not keep them alive. The modules hold what is packed, and may let go of it.
        self._held = list(_beside_packed(weights))
        self._angles: list[tuple[Tensor, Tensor]] = []
        self._num_angles = 0
        if self._num_blocks:
            self._use_cache()
        self._weights_seen = weakref.ref(self._embedding.weight)


class Piece:
    """Tokens from ``start`` to ``end``, how many each text of theirs has, and the blocks that it takes."""

    def __init__(self, start: int, lens: Sequence[int]) -> None:
        self.start, self.end = start, start + sum(lens)
        self.lens = np.array(lens)
        self.num_blocks = -(-self.lens // _BLOCK_SIZE)

    def __len__(self) -> int:
        return self.end - self.start


def cut_pieces(lens: Sequence[int], num_threads: int) -> list[Piece]:
    """Cut texts of ``lens`` tokens into pieces of about as many tokens each, a multiple of ``num_threads`` if they can
    be."""
    ends = np.cumsum(lens)
    num_pieces = num_threads * -(-int(ends[-1]) // (num_threads * _TOKENS_PER_PIECE))
    # Behind the text whose end is nearest to where a piece should end.
    wanted = ends[-1] * np.arange(1, num_pieces) / num_pieces
    behind = np.abs(ends[None] - wanted[:, None]).argmin(1) + 1
    cuts = [0, *sorted(set(behind.tolist()) - {len(lens)}), len(lens)]
    return [Piece(sum(lens[:start]), lens[start:end]) for start, end in itertools.pairwise(cuts)]


def plan_of(forward: EncoderForward, architecture: str, quantization: str | None) -> EncoderPlan | None:
    """How the compiled library can compute what ``forward`` does; None if it cannot, and the log says why.

    Linear layers whose outputs it takes side by side are packed so, each in its place in the model; the others have to
    be packed afterwards.
    """
    base: Any = forward.network.base_model
    try:
        plan = read_encoder(base, forward.max_text_len, forward.first_position)
        _check_shape(plan, base.dtype)
        _pack_in_rows(base, plan, quantization)
    except Exception as error:  # whatever the architecture's own code raises when it is run on a few tokens
        log.info("encoder_not_compiled", architecture=architecture, why=str(error))
        return None
    finally:
        install_attention(forward.network, forward.attention.name)
    return plan


def compile_encoder(
    forward: EncoderForward, plan: EncoderPlan, truth: EncoderReference, tolerance: float | None, architecture: str
) -> EncoderForward:
    """Return what computes by ``plan``, unless it differs from the model on its own: then ``forward``."""
    try:
        made = CompiledEncoder(forward, plan)
        error = truth.error_of(made)
        if error <= (tolerance_of(truth.dtype) if tolerance is None else tolerance):
            return made
        why = f"its hidden states would differ by {error:.1%}"
    except Exception as raised:  # whatever the architecture's own code raises without its layers
        why = f"{type(raised).__name__}: {raised}"
    log.info("encoder_not_compiled", architecture=architecture, why=why)
    return forward


def _check_shape(plan: EncoderPlan, dtype: torch.dtype) -> None:
    shapes = {(one.attention.num_heads, one.attention.num_kv_heads, one.attention.head_dim) for one in plan.layers}
    if len(shapes) > 1:
        raise ModelLoadError("its layers have heads of different shapes")
    ((*_, head_dim),) = shapes
    if not can_decode(dtype, head_dim):
        raise ModelLoadError(f"there is no compiled loop for heads of {head_dim} in {dtype} here")


def _pack_in_rows(base: Any, plan: EncoderPlan, quantization: str | None) -> None:
    arena = Arena()
    for names in names_of_linears(plan):
        made = pack_in_a_row([base.get_submodule(name) for name in names], quantization, arena)
        if made is None:
            raise ModelLoadError(f"{', '.join(names)} cannot be packed side by side")
        for name, linear in zip(names, made, strict=True):
            base.set_submodule(name, linear)


def _weights_of(base: Any, plan: EncoderPlan) -> DecoderWeights:
    norms = [tuple(_norm_weights(base, norm) for norm in (one.attention_norm, one.mlp_norm)) for one in plan.layers]
    final = _norm_weights(base, plan.norm)
    if plan.norms_follow:
        # To the library each is before the part that comes next.
        in_order = [None, *itertools.chain.from_iterable(norms)]
        norms, final = list(zip(in_order[0:-1:2], in_order[1::2], strict=True)), in_order[-1]
    first = plan.layers[0]
    attention, output = first.attention, base.get_submodule(first.attention.output)
    return DecoderWeights(
        # Its own code makes them, and sometimes of narrower ones.
        embeddings=torch.empty(0, output.out_features, dtype=base.get_input_embeddings().weight.dtype),
        layers=tuple(_layer_weights(base, *both) for both in zip(plan.layers, norms, strict=True)),
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
        qkv=_side_by_side(base, attention.qkv),
        output=_side_by_side(base, (attention.output,)),
        gate_up=_side_by_side(base, mlp.inner),
        down=_side_by_side(base, (mlp.down,)),
        scale=attention.scale,
        window=None if window is None else window + 1,
        ahead=window,
        angles=None if rotation is None else rotation.source,
        is_interleaved=rotation is not None and rotation.is_interleaved,
        activation=ACTIVATIONS.index(mlp.activation),
        is_gated=mlp.kind == "gated",
    )


def _beside_packed(weights: DecoderWeights) -> Iterator[Tensor | None]:
    """What was made beside the packed weights themselves."""
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


def _side_by_side(base: nn.Module, names: tuple[str, ...]) -> PackedWeight:
    linears = [base.get_submodule(name) for name in names]
    return side_by_side([linear for linear in linears if isinstance(linear, OwnPackedLinear)])


def _norm_weights(base: Any, plan: NormPlan | None) -> NormWeights | None:
    if plan is None:
        return None
    norm = make_norm(base.get_submodule(plan.name), plan, base.device)
    assert isinstance(norm, Norm | CentredNorm)
    return NormWeights(norm.weight, norm.eps, plan.is_centred, norm.bias)
