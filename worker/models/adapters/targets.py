"""Where in a network an adapter may add something: its linear layers, by the names that PEFT knows them by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ....kernels.decoder import GATE_UP, PRODUCTS_PER_LAYER, QKV
from ..forward import Forward
from ..lean.layers.decoder import LeanDecoder
from ..lean.layers.feed_forward import GatedMlp, OwnMlp, RoutedMlp, SharedExpertMlp
from ..lean.layers.layer import AnyLayer, LeanLayer
from ..lean.layers.mixing import MixingLayer
from ..placing.packed_linear import PackedLinear
from ..placing.quantized_linear import QuantizedLinear

_PROBE_TOKENS = 3

Linear = nn.Linear | PackedLinear | QuantizedLinear


@dataclass(frozen=True)
class Part:
    """Outputs ``start`` to ``end`` of a site: what transformers' linear layer of that name makes."""

    layer: str
    start: int
    end: int


@dataclass(frozen=True)
class AdapterTarget:
    """A linear layer that is computed, and the layers of transformers that are fused in it."""

    linear: Linear
    parts: tuple[Part, ...]


def targets_of(network: nn.Module) -> list[AdapterTarget]:
    """The linear layers of ``network`` but the head; of a lean one four for each dense layer, in their order."""
    if isinstance(network, LeanDecoder):
        return [site for layer in network.layers if isinstance(layer, AnyLayer) for site in _sites_of_lean(layer)]
    get_head = getattr(network, "get_output_embeddings", None)
    return list(_own_sites(network, "", without=get_head() if get_head is not None else None))


def placed_targets_of(network: LeanDecoder) -> dict[int, AdapterTarget]:
    """Those that the compiled decoder knows, by their place among ``PRODUCTS_PER_LAYER`` of each layer.

    A layer may have one part alone, or experts, which no adapter changes, in the place of what all tokens go through.
    """
    found: dict[int, AdapterTarget] = {}
    for index, layer in enumerate(network.layers):
        assert isinstance(layer, AnyLayer)
        first = PRODUCTS_PER_LAYER * index
        sites = {id(site.linear): site for site in _sites_of_lean(layer)}
        mlp = layer.mlp.shared if isinstance(layer.mlp, RoutedMlp) else layer.mlp
        of_attention = [] if layer.plan.attention is None else [layer.in_proj, layer.o_proj]
        of_mlp = [mlp.gate_up_proj, mlp.down_proj] if isinstance(mlp, GatedMlp) else []
        found |= {first + QKV + place: sites[id(linear)] for place, linear in enumerate(of_attention)}
        found |= {first + GATE_UP + place: sites[id(linear)] for place, linear in enumerate(of_mlp)}
    return found


def layers_of(sites: Iterable[AdapterTarget]) -> dict[str, tuple[int, int]]:
    """By the name of a layer, how many inputs and outputs it has."""
    return {part.layer: (site.linear.in_features, part.end - part.start) for site in sites for part in site.parts}


def targets_of_all_tokens(forward: Forward, sites: list[AdapterTarget]) -> list[AdapterTarget]:
    """Those of ``sites`` that are computed for all tokens of a step at once, in their order.

    Some models send tokens to experts, or compute with a weight without calling its layer: there nobody could tell
    whose adapter a row wants. Runs a forward, after which caches have to be allocated anew.
    """
    counts: dict[nn.Module, list[int]] = {site.linear: [] for site in sites}

    def count(module: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        counts[module].append(inputs[0].numel() // inputs[0].shape[-1])

    handles = [site.linear.register_forward_hook(count) for site in sites]
    try:
        forward.profile(_PROBE_TOKENS, _PROBE_TOKENS)
    finally:
        for handle in handles:
            handle.remove()
    return [site for site in sites if counts[site.linear] and set(counts[site.linear]) == {_PROBE_TOKENS}]


def _sites_of_lean(layer: AnyLayer) -> Iterator[AdapterTarget]:
    plan, mlp = layer.plan.mlp, layer.mlp
    if layer.plan.attention is not None:
        yield _fused(layer.in_proj, *_inputs_of(layer))
        yield _fused(layer.o_proj, [layer.plan.attention.output], [layer.o_proj.out_features])
    if plan is None:
        return
    if isinstance(mlp, GatedMlp):
        yield from _sites_of_mlp(mlp, plan.inner, plan.down)
    elif isinstance(mlp, RoutedMlp):
        # Tokens of all adapters meet in the experts themselves.
        if mlp.shared is not None and mlp.plan.shared is not None:
            yield from _sites_of_mlp(mlp.shared, mlp.plan.shared.inner, mlp.plan.shared.down)
        if mlp.shared_gate is not None:
            yield from _own_sites(mlp.shared_gate, mlp.plan.shared_gate)
    elif isinstance(mlp, SharedExpertMlp):
        shared = f"{plan.name}.shared_expert"
        yield from _sites_of_mlp(mlp.shared, [f"{shared}.gate_proj", f"{shared}.up_proj"], f"{shared}.down_proj")
        yield from _own_sites(mlp.gate, f"{plan.name}.shared_expert_gate")
    elif isinstance(mlp, OwnMlp):
        yield from _own_sites(mlp.own, plan.name)
        if mlp.beside is not None:
            yield from _own_sites(mlp.beside, plan.beside)


def _inputs_of(layer: AnyLayer) -> tuple[Sequence[str], list[int]]:
    """Names of the projections of its input that are fused, and how many outputs each has."""
    if isinstance(layer, MixingLayer):
        return layer.mixer.inner, layer.inner_sizes
    assert isinstance(layer, LeanLayer)
    return layer.attention.qkv, layer.inner_sizes


def _sites_of_mlp(mlp: GatedMlp, inner: Sequence[str], down: str) -> Iterator[AdapterTarget]:
    size = mlp.gate_up_proj.out_features // len(inner)
    yield _fused(mlp.gate_up_proj, inner, [size] * len(inner))
    yield _fused(mlp.down_proj, [down], [mlp.down_proj.out_features])


def _fused(linear: Linear, layers: Sequence[str], sizes: list[int]) -> AdapterTarget:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    parts = zip(layers, ends, sizes, strict=True)
    return AdapterTarget(linear, tuple(Part(layer, end - size, end) for layer, end, size in parts))


def _own_sites(module: nn.Module, name: str, without: nn.Module | None = None) -> Iterator[AdapterTarget]:
    for path, child in module.named_modules(prefix=name):
        if isinstance(child, nn.Linear | PackedLinear | QuantizedLinear) and child is not without:
            yield _fused(child, [path], [child.out_features])
