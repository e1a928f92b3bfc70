"""A whole decoder: what lies before its layers and behind them."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from .....shared.errors import ModelLoadError
from ...plan import DecoderPlan
from .attention import sources_of
from .embeddings import read_layer_embeddings
from .layer import read_layer
from .matching import factor_between, known_numbers, must, read_change, rows_of, same
from .norms import norm_after
from .trace import ModuleCall, Trace, some


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
    sources = [source for call in trace.calls for source in sources_of(call, trace)]
    numbers = known_numbers(module, module.config.get_text_config(), module.dtype)
    plans = [
        read_layer(trace, layer, attention, sources, _with_own(numbers, module, layer))
        for layer, attention in attentions.items()
    ]
    check_follow_each_other(trace, layers)
    embedding, embedded = _embedding_of(trace)
    stream, result = trace.given_to(layers[0]), trace.made_by(layers[-1])
    found = norm_after([call for call in trace.calls if "layers" not in call.name.split(".")], result)
    if found is None:
        raise ModelLoadError("its last layer is followed by something else than a normalisation")
    norm, normed = found
    head = _head_of(trace, normed)
    change = read_change(rows_of(some(head.made)), trace.logits, numbers)
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


def check_follow_each_other(trace: Trace, layers: list[str]) -> None:
    for before, after in itertools.pairwise(layers):
        if not same(trace.made_by(before), trace.given_to(after)):
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
        if call.module is own and same(rows_of(some(call.given)), normed):
            return call
    raise ModelLoadError("its head is given something else than the last normalisation makes")


def _with_own(numbers: list[float], module: PreTrainedModel, layer: str) -> list[float]:
    own = known_numbers(module.get_submodule(layer), module.config.get_text_config(), module.dtype)
    return list(dict.fromkeys((*numbers, *own)))


def _weight_of(embedding: nn.Module) -> Tensor:
    weight = getattr(embedding, "weight", None)
    return some(weight if isinstance(weight, Tensor) else None)
