"""Where a layer normalises, and how it adds to the stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from .....shared.errors import ModelLoadError
from ...plan import AttentionPlan, FeedForwardPlan, LayerPlan, MixerPlan, NormPlan
from .attention import AnglesSource, read_attention
from .embeddings import find_embedding_part
from .feed_forward import read_both, read_feed_forward
from .matching import close, must, rows_of, same, scale_of_addition
from .mixers import read_mixer
from .norms import norm_after, norm_before, read_norm
from .parallel_experts import find_experts_beside
from .trace import ModuleCall, Trace, some


def read_layer(
    trace: Trace, name: str, attention: str | None, sources: list[AnglesSource], numbers: list[float]
) -> LayerPlan:
    """The plan of the layer ``name``.

    Args:
        attention: the module of that name is its attention; None of a layer that mixes tokens in another way.

    Raises:
        ModelLoadError: it is made in another way than any plan says.
    """
    parts = _Parts(trace, name, attention)
    if parts.mlp is None or parts.attention is None:
        return _read_one_part(trace, parts, sources, numbers)
    stream, attended, fed = parts.stream, parts.attention, parts.mlp
    input_norm = parts.norm_between(stream, attended.given)
    attention_norm, found = parts.norm_behind(attended.made)
    mlp_out_norm, made = parts.norm_behind(fed.made)
    given = rows_of(some(fed.given))
    plans = {
        "attention": _read_mixing(trace, attended, sources),
        "mlp": parts.read_mlp(trace, fed),
        "input_norm": input_norm,
        "attention_norm": attention_norm,
        "mlp_out_norm": mlp_out_norm,
    }
    between = parts.stream_before_mlp(given)
    if between is not None and scale_of_addition(stream, found, between, numbers) is not None:
        # Of both additions at once: numbers that lie near to each other may round one of them alike.
        streams, added = torch.cat([stream, between]), torch.cat([found, made])
        mlp_norm = parts.norm_between(between, given)
        for out_scale, result in parts.ends():
            scale = scale_of_addition(streams, added, torch.cat([between, result]), numbers)
            if scale is not None:
                part = None if parts.embedding is None else parts.embedding.plan
                more = {"embedding_part": part, "out_scale": out_scale}
                return LayerPlan(**plans, mlp_norm=mlp_norm, residual_scale=scale, **more)
        must(None, f"the result of {name}")
    is_shared = same(given, rows_of(some(attended.given)))
    mlp_norm = None if is_shared else parts.norm_between(stream, given)
    scale = must(scale_of_addition(stream, found + made, parts.result, numbers), f"the result of {name}")
    return LayerPlan(**plans, mlp_norm=mlp_norm, residual_scale=scale, is_parallel=True)


def _read_one_part(trace: Trace, parts: _Parts, sources: list[AnglesSource], numbers: list[float]) -> LayerPlan:
    part = parts.attention or parts.mlp
    assert part is not None
    before = parts.norm_between(parts.stream, part.given)
    behind, made = parts.norm_behind(part.made)
    scale = must(scale_of_addition(parts.stream, made, parts.result, numbers), f"the result of {parts.name}")
    if parts.attention is None:
        mlp = parts.read_mlp(trace, part)
        return LayerPlan(None, mlp, mlp_norm=before, mlp_out_norm=behind, residual_scale=scale)
    mixing = _read_mixing(trace, part, sources)
    return LayerPlan(mixing, None, input_norm=before, attention_norm=behind, residual_scale=scale)


def _read_mixing(trace: Trace, call: ModuleCall, sources: list[AnglesSource]) -> AttentionPlan | MixerPlan:
    attends = any(attention.name == call.name for attention in trace.attentions)
    return read_attention(trace, call, sources) if attends else read_mixer(trace, call)


class _Parts:
    """What a layer called, told apart: attention or what is in its place, feed-forward part, normalisations."""

    def __init__(self, trace: Trace, name: str, attention: str | None) -> None:
        (whole,) = trace.of(name)
        self.name = name
        self.stream = rows_of(some(whole.given))
        self.result = rows_of(some(whole.made))
        children = [call for call in trace.inside(name) if call.name.count(".") == name.count(".") + 1]
        self._norms = [call for call in children if read_norm(call) is not None]
        self.embedding = find_embedding_part(trace, name)
        known = [*self._norms, *(self.embedding.calls if self.embedding else ())]
        others = [
            call
            for call in children
            if all(call is not one for one in known) and not isinstance(call.module, nn.Dropout | nn.Identity)
        ]
        self._own = whole.module
        mixes = [call for call in others if (call.name == attention if attention else _convolves(call))]
        self.attention = mixes[0] if mixes else None
        others = [call for call in others if call is not self.attention]
        self.both: tuple[ModuleCall, ModuleCall] | None = None
        if len(others) == 2 and same(others[0].given, others[1].given):
            first, second = self.both = (others[0], others[1])
            others = [replace(first, made=some(first.made) + some(second.made))]
        self._beside = find_experts_beside(trace, name) if len(others) > 2 else None
        if self._beside is not None:
            others = [call for call in others if all(call is not one for one in self._beside.calls)]
            others.append(replace(self._beside.dense, made=self._beside.made))
        if len(others) > 1 or not (others or self.attention):
            told = ", ".join(call.name.rsplit(".", 1)[-1] for call in others) or "nothing"
            raise ModelLoadError(f"{name} has beside attention and normalisations not one part, but {told}")
        self.mlp = others[0] if others else None

    def ends(self) -> Iterator[tuple[str, Tensor]]:
        """What the stream may be behind the feed-forward part, and the name of what it is multiplied by in the end.

        A number that is 1 cannot be told from none, and is taken all the same: the model loaded again may have another.
        """
        tensors = itertools.chain(
            self._own.named_parameters(recurse=False), self._own.named_buffers(recurse=False), [("", torch.ones(1))]
        )
        for name, tensor in tensors:
            if tensor.numel() != 1 or not tensor.is_floating_point():
                continue
            last, number = f"{self.name}.{name}" if name else "", tensor.detach().to(self.result)
            if self.embedding is None:
                yield last, self.result / number
            elif close((self.embedding.stream + self.embedding.added) * number, self.result):
                yield last, self.embedding.stream

    def read_mlp(self, trace: Trace, call: ModuleCall) -> FeedForwardPlan:
        """The plan of the feed-forward part, which ``call`` is."""
        if self._beside is not None:
            return self._beside.plan
        return read_both(trace, *self.both) if self.both else read_feed_forward(trace, call)

    def norm_between(self, stream: Tensor, given: Tensor | None) -> NormPlan | None:
        """The normalisation by which ``stream`` becomes ``given``; None if that is ``stream`` itself."""
        wanted = rows_of(some(given))
        if same(wanted, stream):
            return None
        found = norm_before(self._norms, wanted, stream)
        if found is None:
            raise ModelLoadError(f"{self.name} does more to the stream than normalise it")
        return found

    def norm_behind(self, made: Tensor | None) -> tuple[NormPlan | None, Tensor]:
        """The normalisation of ``made``, if there is one, and what is added in the end."""
        rows = rows_of(some(made))
        found = norm_after(self._norms, rows)
        return (None, rows) if found is None else found

    def stream_before_mlp(self, given: Tensor) -> Tensor | None:
        """The stream of which the feed-forward part's input ``given`` was made; None if that is the layer's own."""
        of_norm = next((call for call in self._norms if same(rows_of(some(call.made)), given)), None)
        before = given if of_norm is None else rows_of(some(of_norm.given))
        return None if same(before, self.stream) else before


def _convolves(call: ModuleCall) -> bool:
    return any(isinstance(child, nn.Conv1d) for child in call.module.children())
