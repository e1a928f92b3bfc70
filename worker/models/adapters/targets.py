"""The linear layers of a network that adapters can change, by their names in PEFT."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ....kernels.decoder import GATE_UP, PRODUCTS_PER_LAYER, QKV
from ..forward import Forward
from ..lean.layers.decoder import LeanDecoder
from ..lean.layers.feed_forward import GatedMlp, OwnMlp, RoutedMlp, SharedExpertMlp
from ..lean.layers.layer import AnyLayer, LeanLayer
from ..lean.layers.mixing import MixingLayer
from ..parallel.groups import local_module, named_local_modules
from ..placing.packed_linear import PackedLinear
from ..placing.quantized_linear import QuantizedLinear
from ..pooling.encoder_plan import EncoderPlan, names_of_linears

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_TOKENS = 3

Linear = nn.Linear | PackedLinear | QuantizedLinear


@dataclass(frozen=True)
class Part:
    """Outputs ``start`` to ``end`` of a target: those of transformers' linear layer of that name."""

    layer: str
    start: int
    end: int


@dataclass(frozen=True)
class AdapterTarget:
    """A linear layer as it is computed, and the layers of transformers that are fused in it.

    Args:
        linear: the layer; the first one if several are computed side by side.
    """

    linear: Linear
    parts: tuple[Part, ...]


def targets_of(network: nn.Module) -> list[AdapterTarget]:
    """Return the linear layers of ``network`` without the head; for a lean one four per dense layer, in order."""
    if isinstance(network, LeanDecoder):
        return [
            target for layer in network.layers if isinstance(layer, AnyLayer) for target in _targets_of_layer(layer)
        ]
    get_head = getattr(network, "get_output_embeddings", None)
    return list(_unfused_targets(network, "", without=local_module(get_head()) if get_head is not None else None))


def placed_targets_of(network: LeanDecoder) -> dict[int, AdapterTarget]:
    """Return the targets that the compiled decoder supports, by their index among ``PRODUCTS_PER_LAYER`` of each layer.

    A layer may have only one part. Experts are not targets; only a dense part that all tokens go through is.
    """
    placed: dict[int, AdapterTarget] = {}
    for index, layer in enumerate(network.layers):
        assert isinstance(layer, AnyLayer)
        first = PRODUCTS_PER_LAYER * index
        targets = {id(target.linear): target for target in _targets_of_layer(layer)}
        mlp = layer.mlp.shared if isinstance(layer.mlp, RoutedMlp) else layer.mlp
        attention = [] if layer.plan.attention is None else [layer.in_proj, layer.o_proj]
        dense = [mlp.gate_up_proj, mlp.down_proj] if isinstance(mlp, GatedMlp) else []
        placed |= {first + QKV + place: targets[id(linear)] for place, linear in enumerate(attention)}
        placed |= {first + GATE_UP + place: targets[id(linear)] for place, linear in enumerate(dense)}
    return placed


def placed_targets_of_encoder(network: PreTrainedModel, plan: EncoderPlan) -> dict[int, AdapterTarget]:
    """Return the targets of a compiled encoder, as ``placed_targets_of``."""
    base: Any = network.base_model
    prefix = "" if base is network else f"{network.base_model_prefix}."
    placed: dict[int, AdapterTarget] = {}
    for place, names in enumerate(names_of_linears(plan)):
        linears = [base.get_submodule(name) for name in names]
        sizes = [linear.out_features for linear in linears]
        placed[place] = _fused(linears[0], [f"{prefix}{name}" for name in names], sizes)
    return placed


def layers_of(targets: Iterable[AdapterTarget]) -> dict[str, tuple[int, int]]:
    """Return the numbers of inputs and outputs of each layer by its name."""
    return {
        part.layer: (target.linear.in_features, part.end - part.start) for target in targets for part in target.parts
    }


def targets_of_all_tokens(forward: Forward, targets: list[AdapterTarget]) -> list[AdapterTarget]:
    """Return the ``targets`` that compute all tokens of a step in one call, in order.

    Some models send tokens to experts, or use a weight without calling its layer; then the adapter of a row would be
    unknown. Runs a forward, after which caches must be allocated again.
    """
    counts: dict[nn.Module, list[int]] = {target.linear: [] for target in targets}

    def count(module: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        counts[module].append(inputs[0].numel() // inputs[0].shape[-1])

    handles = [target.linear.register_forward_hook(count) for target in targets]
    try:
        forward.profile(_PROBE_TOKENS, _PROBE_TOKENS)
    finally:
        for handle in handles:
            handle.remove()
    return [target for target in targets if counts[target.linear] and set(counts[target.linear]) == {_PROBE_TOKENS}]


def _targets_of_layer(layer: AnyLayer) -> Iterator[AdapterTarget]:
    plan, mlp = layer.plan.mlp, local_module(layer.mlp)
    if layer.plan.attention is not None:
        output = local_module(layer.o_proj)
        yield _fused(layer.in_proj, *_inputs_of(layer))
        yield _fused(output, [layer.plan.attention.output], [output.out_features])
    if plan is None:
        return
    if isinstance(mlp, GatedMlp):
        yield from _targets_of_mlp(mlp, plan.inner, plan.down)
    elif isinstance(mlp, RoutedMlp):
        # The experts themselves mix tokens of all adapters.
        if mlp.shared is not None and mlp.plan.shared is not None:
            yield from _targets_of_mlp(mlp.shared, mlp.plan.shared.inner, mlp.plan.shared.down)
        if mlp.shared_gate is not None:
            yield from _unfused_targets(mlp.shared_gate, mlp.plan.shared_gate)
    elif isinstance(mlp, SharedExpertMlp):
        shared = f"{plan.name}.shared_expert"
        yield from _targets_of_mlp(mlp.shared, [f"{shared}.gate_proj", f"{shared}.up_proj"], f"{shared}.down_proj")
        yield from _unfused_targets(mlp.gate, f"{plan.name}.shared_expert_gate")
    elif isinstance(mlp, OwnMlp):
        yield from _unfused_targets(mlp.own, plan.name)
        if mlp.beside is not None:
            yield from _unfused_targets(mlp.beside, plan.beside)


def _inputs_of(layer: AnyLayer) -> tuple[Sequence[str], list[int]]:
    """Return the names of the fused projections of the layer's input, and the number of outputs of each."""
    if isinstance(layer, MixingLayer):
        return layer.mixer.inner, layer.inner_sizes
    assert isinstance(layer, LeanLayer)
    return layer.attention.qkv, layer.inner_sizes


def _targets_of_mlp(mlp: GatedMlp, inner: Sequence[str], down: str) -> Iterator[AdapterTarget]:
    size = mlp.gate_up_proj.out_features // len(inner)
    yield _fused(mlp.gate_up_proj, inner, [size] * len(inner))
    output = local_module(mlp.down_proj)
    yield _fused(output, [down], [output.out_features])


def _fused(linear: Linear, layers: Sequence[str], sizes: list[int]) -> AdapterTarget:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    parts = zip(layers, ends, sizes, strict=True)
    return AdapterTarget(linear, tuple(Part(layer, end - size, end) for layer, end, size in parts))


def _unfused_targets(module: nn.Module, name: str, without: nn.Module | None = None) -> Iterator[AdapterTarget]:
    for path, child in named_local_modules(module, name):
        if isinstance(child, nn.Linear | PackedLinear | QuantizedLinear) and child is not without:
            yield _fused(child, [path], [child.out_features])
