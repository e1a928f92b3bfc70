"""A whole decoder: what lies before its layers and behind them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from .....shared.errors import ModelLoadError
from ..plan import AnglesPlan, DecoderPlan
from ..rotation import angles_of, as_halves
from .attention import AnglesSource
from .embeddings import read_layer_embeddings
from .layer import read_layer
from .matching import close, rows_of, same
from .norms import norm_after
from .numbers import factor_between, known_numbers, must, read_change
from .trace import ModuleCall, Trace


@torch.inference_mode()
def read_decoder(
    module: PreTrainedModel, max_model_len: int, serving_device: torch.device | None = None
) -> DecoderPlan:
    """Run ``module`` on a few tokens and tell how it is made; its attention has to be set anew afterwards.

    Args:
        serving_device: what the plan is for, by whose kernels; None for that on which ``module`` is.

    Raises:
        ModelLoadError: it is no decoder of the kind that the lean path computes; says what is different.
    """
    trace = Trace(module, max_model_len, serving_device or module.device)
    attentions = _layers_of(trace)
    layers = list(attentions)
    sources = [source for call in trace.calls for source in _sources_of(call, trace)]
    numbers = known_numbers(module, module.config.get_text_config(), module.dtype)
    plans = [
        read_layer(trace, layer, attention, sources, _with_own(numbers, module, layer))
        for layer, attention in attentions.items()
    ]
    _check_follow_each_other(trace, layers)
    embedding, embedded = _embedding_of(trace)
    stream, result = _given(trace, layers[0]), _made(trace, layers[-1])
    found = norm_after([call for call in trace.calls if "layers" not in call.name.split(".")], result)
    if found is None:
        raise ModelLoadError("its last layer is followed by something else than a normalisation")
    norm, normed = found
    head = _head_of(trace, normed)
    change = read_change(rows_of(_some(head.made)), trace.logits, numbers)
    if change is None:
        raise ModelLoadError("it does more to logits than scale or cap them")
    rows = F.embedding(trace.token_ids, _weight_of(embedding.module))
    return DecoderPlan(
        embedding=embedding.name,
        head=head.name,
        norm=norm,
        layers=tuple(plans),
        angles=tuple(source.plan for source in sources),
        embedding_scale=must(factor_between(rows, embedded, numbers), "an embedding"),
        stream_scale=must(factor_between(embedded, stream, numbers), "what its first layer is given"),
        logit_scale=change[0],
        logit_softcap=change[1],
        layer_embeddings=read_layer_embeddings(trace, layers, stream, numbers),
    )


def has_layers(module: PreTrainedModel) -> bool:
    """Whether there is a list of layers, so that ``read_decoder`` is worth a try.

    Code that a model brings along may do for some tokens what it does not for those that are tried: it is called.
    """
    if not type(module).__module__.startswith("transformers.models."):
        return False
    return any(name.endswith("layers") and _is_list(child) for name, child in module.named_modules())


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) > 0


def _layers_of(trace: Trace) -> dict[str, str | None]:
    """``model.layers.3`` and ``model.layers.3.self_attn``, None where a layer has no attention, in their order."""
    attentions = [attention.name for attention in trace.attentions]
    attending = {attention.rpartition(".")[0]: attention for attention in attentions}
    lists = {name.rpartition(".")[0] for name in attending}
    if len(attending) != len(attentions) or len(lists) != 1 or not all(_is_numbered(name) for name in attending):
        raise ModelLoadError("its layers do not attend once each")
    (whole,) = lists
    names = [f"{whole}.{index}" for index, _ in enumerate(trace.module.get_submodule(whole).children())]
    called = {name: attending.get(name) for name in names if trace.of(name)}
    if [layer for layer in called if layer in attending] != list(attending):
        raise ModelLoadError("its layers do not follow each other in their order")
    return called


def _is_numbered(name: str) -> bool:
    return name.rpartition(".")[2].isdigit()


def _check_follow_each_other(trace: Trace, layers: list[str]) -> None:
    for before, after in itertools.pairwise(layers):
        if not same(_made(trace, before), _given(trace, after)):
            raise ModelLoadError(f"{after} is given something else than {before} makes")


def _embedding_of(trace: Trace) -> tuple[ModuleCall, Tensor]:
    own = trace.module.get_input_embeddings()
    for call in trace.calls:
        if call.module is own and call.made is not None:
            return call, rows_of(call.made)
    raise ModelLoadError("it does not call its embedding")


def _head_of(trace: Trace, normed: Tensor) -> ModuleCall:
    own = trace.module.get_output_embeddings()
    for call in trace.calls:
        if call.module is own and same(rows_of(_some(call.given)), normed):
            return call
    raise ModelLoadError("its head is given something else than the last normalisation makes")


def _sources_of(call: ModuleCall, trace: Trace) -> list[AnglesSource]:
    """The ways to read what ``call`` makes as angles of ``trace.positions``; none if it makes anything else."""
    found = _as_angles(call, trace.num_tokens)
    if found is None:
        return []
    behind = [value for value in call.arguments[1:] if not isinstance(value, Tensor)]
    options = {name: value for name, value in call.options.items() if not isinstance(value, Tensor)}
    given = AnglesPlan(call.name, tuple(behind), tuple(options.items()))
    sources = []
    for stride, repeats in ((1, True), (2, True), (1, False)):
        plan = AnglesPlan(given.name, given.arguments, given.options, stride, repeats)
        cos, sin = (as_halves(angles, plan) for angles in found)
        if _is_read_well(rows_of(found[0]), cos, plan) and _is_alone(call, plan, trace, cos):
            sources.append(AnglesSource(plan, cos, sin))
    return sources


def _as_angles(call: ModuleCall, num_tokens: int) -> tuple[Tensor, Tensor] | None:
    results: Any = call.results
    if not isinstance(results, tuple) or len(results) != 2 or not all(isinstance(one, Tensor) for one in results):
        return None
    cos, sin = results
    is_of_tokens = cos.shape == sin.shape and cos.dim() in (2, 3) and cos.shape[-2] == num_tokens
    if not is_of_tokens or not bool(((cos.float() ** 2 + sin.float() ** 2).std(-1) < 0.05).all()):
        return None
    return (cos, sin) if cos.dim() == 2 or cos.shape[0] == 1 else None


def _is_read_well(made: Tensor, cos: Tensor, plan: AnglesPlan) -> bool:
    """Whether columns that are taken for one angle are alike."""
    if not plan.repeats:
        return True
    if plan.stride == 2:
        return torch.equal(made[:, ::2], made[:, 1::2])
    first, second = made.chunk(2, dim=1)
    return torch.equal(first, second)


def _is_alone(call: ModuleCall, plan: AnglesPlan, trace: Trace, cos: Tensor) -> bool:
    """Whether a token's angles are its own, whatever the longest request of a step is.

    Raises:
        ModelLoadError: they are not.
    """
    try:
        alone, _ = angles_of(call.module, plan, _some(call.given), trace.first_positions)
    except Exception:  # it takes something else than hidden states and positions, and so is no source of angles
        return False
    if not close(alone, cos[: len(alone)]):
        raise ModelLoadError(
            "the angles of its rotary embedding follow the longest request of a step; with a max_model_len that needs "
            "no scaling they would not"
        )
    return True


def _with_own(numbers: list[float], module: PreTrainedModel, layer: str) -> list[float]:
    own = known_numbers(module.get_submodule(layer), module.config.get_text_config(), module.dtype)
    return list(dict.fromkeys((*numbers, *own)))


def _weight_of(embedding: nn.Module) -> Tensor:
    weight = getattr(embedding, "weight", None)
    return _some(weight if isinstance(weight, Tensor) else None)


def _given(trace: Trace, name: str) -> Tensor:
    return rows_of(_some(trace.of(name)[0].given))


def _made(trace: Trace, name: str) -> Tensor:
    return rows_of(_some(trace.of(name)[0].made))


def _some(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ModelLoadError("one of its modules takes or makes no tensor")
    return tensor
