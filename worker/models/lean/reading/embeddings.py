"""Embeddings that layers have of their own: the part of a layer that lets one in, and how the model makes them."""

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
    """A layer's last part, found.

    Args:
        stream: that it starts from; ``added``: what it adds to that.
        embedding: what the layer was given for it, ``[T, size]``.
        calls: of which it consists.
    """

    plan: EmbeddingPartPlan
    stream: Tensor
    added: Tensor
    embedding: Tensor
    calls: list[ModuleCall]


def find_embedding_part(trace: Trace, layer: str) -> EmbeddingPart | None:
    """Two projections with an activation between, which opens for something that the layer is given; None without."""
    children = [call for call in trace.inside(layer) if call.name.count(".") == layer.count(".") + 1]
    linears = [call for call in children if isinstance(call.module, nn.Linear) and call.made is not None]
    (whole,) = trace.of(layer)
    for gate, output in itertools.permutations(linears, 2):
        assert gate.made is not None
        assert gate.given is not None
        assert output.made is not None
        assert output.given is not None
        opened, let_in = rows_of(gate.made), rows_of(output.given)
        for embedding in _given_beside(whole, opened):
            activation = best(ACTIVATIONS, _opening(opened, embedding), let_in)
            if activation is None:
                continue
            between = [call for call in children if same(call.given, gate.made)]
            added = rows_of(output.made)
            found = norm_after(children, added)
            norm, added = (None, added) if found is None else found
            plan = EmbeddingPartPlan(gate.name, output.name, activation, norm)
            return EmbeddingPart(plan, rows_of(gate.given), added, embedding, [gate, output, *between])
    return None


def _opening(opened: Tensor, embedding: Tensor) -> Callable[[str], Tensor]:
    return lambda activation: activate(opened, activation) * embedding


def _given_beside(whole: ModuleCall, like: Tensor) -> Iterator[Tensor]:
    tensors = (value for value in (*whole.arguments, *whole.options.values()) if isinstance(value, Tensor))
    yield from (rows for rows in map(rows_of, tensors) if rows.shape == like.shape and rows.dtype == like.dtype)


def read_layer_embeddings(
    trace: Trace, layers: list[str], stream: Tensor, numbers: list[float]
) -> LayerEmbeddingsPlan | None:
    """How the model makes what ``layers`` let in; None where they have no part for it.

    Args:
        stream: ``[T, hidden size]``, what the first layer is given.

    Raises:
        ModelLoadError: in another way than is known, or only some layers have such a part.
    """
    parts = [find_embedding_part(trace, layer) for layer in layers]
    wanted = [part.embedding for part in parts if part is not None]
    if not wanted:
        return None
    if len(wanted) < len(layers):
        raise ModelLoadError("some of its layers let embeddings of their own in, and some do not")
    made = torch.stack(wanted, dim=1)
    table, projection, norm = _makers_of(made, trace, stream)
    plan = read_norm(norm)
    assert plan is not None
    assert norm.given is not None
    config, dtype = trace.module.config.get_text_config(), made.dtype
    holders = (trace.module.get_submodule(table.name.rpartition(".")[0]), table.module)
    numbers = [*numbers, *(number for holder in holders for number in known_numbers(holder, config, dtype))]
    own = F.embedding(trace.token_ids, trace.module.get_parameter(f"{table.name}.weight"))
    projected = _rows(projection).view(made.shape)
    joined = _rows(norm) + _rows(table).view(made.shape)
    what = "an embedding of its layers"
    return LayerEmbeddingsPlan(
        table.name,
        projection.name,
        plan,
        made.shape[2],
        embedding_scale=must(factor_between(own, _rows(table), numbers), what),
        projection_scale=must(factor_between(projected, rows_of(norm.given), numbers), what),
        sum_scale=must(factor_between(joined, made, numbers), what),
    )


def _makers_of(made: Tensor, trace: Trace, stream: Tensor) -> tuple[ModuleCall, ModuleCall, ModuleCall]:
    """The calls of a table, a projection of ``stream`` and a norm that ``made [T, layers, size]`` may come from."""
    calls = [call for call in trace.calls if "layers" not in call.name.split(".") and call.made is not None]
    flat = [call for call in calls if _rows(call).shape == made.flatten(1).shape]
    first = trace.module.get_input_embeddings()
    table = next((call for call in flat if isinstance(call.module, nn.Embedding) and call.module is not first), None)
    projection = next(
        (call for call in flat if isinstance(call.module, nn.Linear) and same(call.given, stream[None])), None
    )
    norm = next((call for call in calls if _rows(call).shape == made.shape and read_norm(call) is not None), None)
    if table is None or projection is None or norm is None:
        raise ModelLoadError("embeddings of its layers are made in no known way")
    return table, projection, norm


def _rows(call: ModuleCall) -> Tensor:
    assert call.made is not None
    return rows_of(call.made)
