"""Read a layer: where it normalises, how it adds to the residual stream, and the embedding that it adds, if any."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....kernels.gated_activation import ACTIVATIONS, activate
from .....shared.errors import ModelLoadError
from ...plan import (
    AttentionPlan,
    EmbeddingPartPlan,
    FeedForwardPlan,
    LayerEmbeddingsPlan,
    LayerPlan,
    MixerPlan,
    NormPlan,
)
from .attention import AnglesSource, read_attention
from .feed_forward import find_parallel_experts, read_both, read_feed_forward
from .mixers import read_mixer
from .norms import norm_after, norm_before, read_norm
from .trace import (
    ModuleCall,
    Trace,
    best,
    close,
    factor_between,
    known_numbers,
    must,
    rows_of,
    same,
    scale_of_addition,
    some,
)


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


@dataclass(frozen=True)
class EmbeddingPart:
    """The last part of a layer that adds its embedding.

    Args:
        stream: its input.
        added: its addition to the stream.
        embedding: the layer's argument for it, ``[T, size]``.
        calls: the calls it consists of.
    """

    plan: EmbeddingPartPlan
    stream: Tensor
    added: Tensor
    embedding: Tensor
    calls: list[ModuleCall]


def find_embedding_part(trace: Trace, layer: str) -> EmbeddingPart | None:
    """Find two projections with a gated activation between, applied to an argument of the layer; None if there are
    none.
    """
    children = [call for call in trace.calls_inside(layer) if call.name.count(".") == layer.count(".") + 1]
    linears = [call for call in children if isinstance(call.module, nn.Linear) and call.output is not None]
    (layer_call,) = trace.calls_of(layer)
    for gate, projection in itertools.permutations(linears, 2):
        assert gate.output is not None
        assert gate.input is not None
        assert projection.output is not None
        assert projection.input is not None
        gate_rows, gated = rows_of(gate.output), rows_of(projection.input)
        for embedding in _arguments_like(layer_call, gate_rows):
            activation = best(ACTIVATIONS, _opening(gate_rows, embedding), gated)
            if activation is None:
                continue
            between = [call for call in children if same(call.input, gate.output)]
            added = rows_of(projection.output)
            norm_and_output = norm_after(children, added)
            norm, added = (None, added) if norm_and_output is None else norm_and_output
            plan = EmbeddingPartPlan(gate.name, projection.name, activation, norm)
            return EmbeddingPart(plan, rows_of(gate.input), added, embedding, [gate, projection, *between])
    return None


def _opening(gate_rows: Tensor, embedding: Tensor) -> Callable[[str], Tensor]:
    return lambda activation: activate(gate_rows, activation) * embedding


def _arguments_like(layer_call: ModuleCall, like: Tensor) -> Iterator[Tensor]:
    """Yield the tensor arguments of a layer that have the shape and dtype of ``like``."""
    tensors = (value for value in (*layer_call.arguments, *layer_call.options.values()) if isinstance(value, Tensor))
    yield from (rows for rows in map(rows_of, tensors) if rows.shape == like.shape and rows.dtype == like.dtype)


def read_layer_embeddings(
    trace: Trace, layers: list[str], stream: Tensor, numbers: list[float]
) -> LayerEmbeddingsPlan | None:
    """Return how the model computes the embeddings of ``layers``; None if no layer has a part for them.

    Args:
        stream: ``[T, hidden size]``, input of the first layer.

    Raises:
        ModelLoadError: in an unknown way, or only some layers have such a part.
    """
    parts = [find_embedding_part(trace, layer) for layer in layers]
    embeddings = [part.embedding for part in parts if part is not None]
    if not embeddings:
        return None
    if len(embeddings) < len(layers):
        raise ModelLoadError("some of its layers let embeddings of their own in, and some do not")
    stacked = torch.stack(embeddings, dim=1)
    table, projection, norm = _makers_of(stacked, trace, stream)
    plan = read_norm(norm)
    assert plan is not None
    assert norm.input is not None
    config, dtype = trace.module.config.get_text_config(), stacked.dtype
    holders = (trace.module.get_submodule(table.name.rpartition(".")[0]), table.module)
    numbers = [*numbers, *(number for holder in holders for number in known_numbers(holder, config, dtype))]
    rows = F.embedding(trace.token_ids, trace.module.get_parameter(f"{table.name}.weight"))
    projected = _rows(projection).view(stacked.shape)
    joined = _rows(norm) + _rows(table).view(stacked.shape)
    what = "an embedding of its layers"
    return LayerEmbeddingsPlan(
        table.name,
        projection.name,
        plan,
        stacked.shape[2],
        embedding_scale=must(factor_between(rows, _rows(table), numbers), what),
        projection_scale=must(factor_between(projected, rows_of(norm.input), numbers), what),
        sum_scale=must(factor_between(joined, stacked, numbers), what),
    )


def _makers_of(embeddings: Tensor, trace: Trace, stream: Tensor) -> tuple[ModuleCall, ModuleCall, ModuleCall]:
    """Return the calls of a table, a projection of ``stream`` and a norm that ``embeddings [T, layers, size]`` may come
    from.
    """
    calls = [call for call in trace.calls if "layers" not in call.name.split(".") and call.output is not None]
    flat = [call for call in calls if _rows(call).shape == embeddings.flatten(1).shape]
    first = trace.module.get_input_embeddings()
    table = next((call for call in flat if isinstance(call.module, nn.Embedding) and call.module is not first), None)
    projection = next(
        (call for call in flat if isinstance(call.module, nn.Linear) and same(call.input, stream[None])), None
    )
    norm = next((call for call in calls if _rows(call).shape == embeddings.shape and read_norm(call) is not None), None)
    if table is None or projection is None or norm is None:
        raise ModelLoadError("embeddings of its layers are made in no known way")
    return table, projection, norm


def _rows(call: ModuleCall) -> Tensor:
    assert call.output is not None
    return rows_of(call.output)
