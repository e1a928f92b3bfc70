"""Read where a layer normalises, and how it adds to the residual stream."""

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
from .parallel_experts import find_parallel_experts
from .trace import ModuleCall, Trace, some


def read_layer(
    trace: Trace, name: str, attention: str | None, sources: list[AnglesSource], numbers: list[float]
) -> LayerPlan:
    """Return the plan of the layer ``name``.

    Args:
        attention: name of its attention module; None for a layer with a mixer.

    Raises:
        ModelLoadError: no plan describes the layer.
    """
    parts = _Parts(trace, name, attention)
    if parts.mlp is None or parts.attention is None:
        return _read_one_part(trace, parts, sources, numbers)
    stream, attention_call, mlp_call = parts.stream, parts.attention, parts.mlp
    input_norm = parts.norm_between(stream, attention_call.input)
    attention_norm, attention_out = parts.norm_of_output(attention_call.output)
    mlp_out_norm, mlp_out = parts.norm_of_output(mlp_call.output)
    mlp_input = rows_of(some(mlp_call.input))
    plans = {
        "attention": _read_mixing(trace, attention_call, sources),
        "mlp": parts.read_mlp(trace, mlp_call),
        "input_norm": input_norm,
        "attention_norm": attention_norm,
        "mlp_out_norm": mlp_out_norm,
    }
    between = parts.stream_before_mlp(mlp_input)
    if between is not None and scale_of_addition(stream, attention_out, between, numbers) is not None:
        # Both additions are compared together, since rounding may make numbers that are close agree in one of them.
        streams, added = torch.cat([stream, between]), torch.cat([attention_out, mlp_out])
        mlp_norm = parts.norm_between(between, mlp_input)
        for out_scale, result in parts.ends():
            scale = scale_of_addition(streams, added, torch.cat([between, result]), numbers)
            if scale is not None:
                part = None if parts.embedding is None else parts.embedding.plan
                more = {"embedding_part": part, "out_scale": out_scale}
                return LayerPlan(**plans, mlp_norm=mlp_norm, residual_scale=scale, **more)
        must(None, f"the result of {name}")
    is_shared = same(mlp_input, rows_of(some(attention_call.input)))
    mlp_norm = None if is_shared else parts.norm_between(stream, mlp_input)
    scale = must(scale_of_addition(stream, attention_out + mlp_out, parts.result, numbers), f"the result of {name}")
    return LayerPlan(**plans, mlp_norm=mlp_norm, residual_scale=scale, is_parallel=True)


def _read_one_part(trace: Trace, parts: _Parts, sources: list[AnglesSource], numbers: list[float]) -> LayerPlan:
    part = parts.attention or parts.mlp
    assert part is not None
    before = parts.norm_between(parts.stream, part.input)
    after, output = parts.norm_of_output(part.output)
    scale = must(scale_of_addition(parts.stream, output, parts.result, numbers), f"the result of {parts.name}")
    if parts.attention is None:
        mlp = parts.read_mlp(trace, part)
        return LayerPlan(None, mlp, mlp_norm=before, mlp_out_norm=after, residual_scale=scale)
    mixing = _read_mixing(trace, part, sources)
    return LayerPlan(mixing, None, input_norm=before, attention_norm=after, residual_scale=scale)


def _read_mixing(trace: Trace, call: ModuleCall, sources: list[AnglesSource]) -> AttentionPlan | MixerPlan:
    attends = any(attention.name == call.name for attention in trace.attentions)
    return read_attention(trace, call, sources) if attends else read_mixer(trace, call)


class _Parts:
    """The calls of a layer by kind: attention or mixer, feed-forward part, norms."""

    def __init__(self, trace: Trace, name: str, attention: str | None) -> None:
        (whole,) = trace.calls_of(name)
        self.name = name
        self.stream = rows_of(some(whole.input))
        self.result = rows_of(some(whole.output))
        children = [call for call in trace.calls_inside(name) if call.name.count(".") == name.count(".") + 1]
        self._norms = [call for call in children if read_norm(call) is not None]
        self.embedding = find_embedding_part(trace, name)
        excluded = [*self._norms, *(self.embedding.calls if self.embedding else ())]
        others = [
            call
            for call in children
            if all(call is not other for other in excluded) and not isinstance(call.module, nn.Dropout | nn.Identity)
        ]
        self._own = whole.module
        mixes = [call for call in others if (call.name == attention if attention else _convolves(call))]
        self.attention = mixes[0] if mixes else None
        others = [call for call in others if call is not self.attention]
        self.both: tuple[ModuleCall, ModuleCall] | None = None
        if len(others) == 2 and same(others[0].input, others[1].input):
            first, second = self.both = (others[0], others[1])
            others = [replace(first, output=some(first.output) + some(second.output))]
        self._beside = find_parallel_experts(trace, name) if len(others) > 2 else None
        if self._beside is not None:
            others = [call for call in others if all(call is not other for other in self._beside.calls)]
            others.append(replace(self._beside.dense, output=self._beside.output))
        if len(others) > 1 or not (others or self.attention):
            names = ", ".join(call.name.rsplit(".", 1)[-1] for call in others) or "nothing"
            raise ModelLoadError(f"{name} has beside attention and normalisations not one part, but {names}")
        self.mlp = others[0] if others else None

    def ends(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the possible states of the stream after the feed-forward part, each with the name of the final factor.

        A number that is 1 cannot be distinguished from none. It is taken nevertheless, since the model loaded again may
        have another value.
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
        """Return the plan of the feed-forward part ``call``."""
        if self._beside is not None:
            return self._beside.plan
        return read_both(trace, *self.both) if self.both else read_feed_forward(trace, call)

    def norm_between(self, stream: Tensor, inputs: Tensor | None) -> NormPlan | None:
        """Return the norm that turns ``stream`` into ``inputs``; None if they are equal."""
        rows = rows_of(some(inputs))
        if same(rows, stream):
            return None
        norm = norm_before(self._norms, rows, stream)
        if norm is None:
            raise ModelLoadError(f"{self.name} does more to the stream than normalise it")
        return norm

    def norm_of_output(self, output: Tensor | None) -> tuple[NormPlan | None, Tensor]:
        """Return the norm of ``output``, if there is one, and the rows that are added in the end."""
        rows = rows_of(some(output))
        norm_and_output = norm_after(self._norms, rows)
        return (None, rows) if norm_and_output is None else norm_and_output

    def stream_before_mlp(self, inputs: Tensor) -> Tensor | None:
        """Return the stream that the feed-forward part's ``inputs`` were computed from; None if it is the layer's own
        input.
        """
        norm = next((call for call in self._norms if same(rows_of(some(call.output)), inputs)), None)
        before = inputs if norm is None else rows_of(some(norm.input))
        return None if same(before, self.stream) else before


def _convolves(call: ModuleCall) -> bool:
    return any(isinstance(child, nn.Conv1d) for child in call.module.children())
