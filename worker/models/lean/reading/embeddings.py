"""Read embeddings per layer: the part of a layer that adds one, and how the model computes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....kernels.gated_activation import ACTIVATIONS, activate
from .....shared.errors import ModelLoadError
from ...plan import EmbeddingPartPlan, LayerEmbeddingsPlan
from .matching import best, factor_between, known_numbers, must, rows_of, same
from .norms import norm_after, read_norm
from .trace import ModuleCall, Trace


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
