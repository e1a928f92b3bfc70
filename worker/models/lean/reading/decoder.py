"""Read a whole decoder, including the parts before and after its layers."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....shared.errors import ModelLoadError
from ...plan import DecoderPlan
from .attention import sources_of
from .layer import read_layer, read_layer_embeddings
from .norms import norm_after
from .trace import ModuleCall, Trace, factor_between, known_numbers, must, read_change, rows_of, same, some

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.inference_mode()
def read_decoder(
    module: PreTrainedModel, max_model_len: int, serving_device: torch.device | None = None
) -> DecoderPlan:
    """Run ``module`` on a few tokens and return its plan. Its attention must be set again afterwards.

    Args:
        serving_device: the device whose kernels the plan is for; None for that of ``module``.

    Raises:
        ModelLoadError: the lean path cannot compute this decoder; the message names the difference.
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
    stream, result = trace.input_of(layers[0]), trace.output_of(layers[-1])
    norm_and_output = norm_after([call for call in trace.calls if "layers" not in call.name.split(".")], result)
    if norm_and_output is None:
        raise ModelLoadError("its last layer is followed by something else than a normalisation")
    norm, normed = norm_and_output
    head = _head_of(trace, normed)
    change = read_change(rows_of(some(head.output)), trace.logits, numbers)
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
        ties_head=getattr(head.module, "weight", None) is _weight_of(embedding.module),
    )


def has_layers(module: PreTrainedModel) -> bool:
    """Whether the module has a list of layers, so that ``read_decoder`` is worth a try.

    Code that comes with a model is excluded, since it may treat some tokens differently from those of the trace.
    """
    if not type(module).__module__.startswith("transformers.models."):
        return False
    return any(name.endswith("layers") and _is_list(child) for name, child in module.named_modules())


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) > 0


def _layers_of(trace: Trace) -> dict[str, str | None]:
    """Return the names of the layers in order, each with its attention module, for example ``model.layers.3`` and
    ``model.layers.3.self_attn``; None in a layer without attention.
    """
    attentions = [attention.name for attention in trace.attentions]
    attending = {attention.rpartition(".")[0]: attention for attention in attentions}
    lists = {name.rpartition(".")[0] for name in attending}
    if len(attending) != len(attentions) or len(lists) != 1 or not all(_is_numbered(name) for name in attending):
        raise ModelLoadError("its layers do not attend once each")
    (layer_list,) = lists
    names = [f"{layer_list}.{index}" for index, _ in enumerate(trace.module.get_submodule(layer_list).children())]
    called = {name: attending.get(name) for name in names if trace.calls_of(name)}
    if [layer for layer in called if layer in attending] != list(attending):
        raise ModelLoadError("its layers do not follow each other in their order")
    return called


def _is_numbered(name: str) -> bool:
    return name.rpartition(".")[2].isdigit()


def check_follow_each_other(trace: Trace, layers: list[str]) -> None:
    for before, after in itertools.pairwise(layers):
        if not same(trace.output_of(before), trace.input_of(after)):
            raise ModelLoadError(f"{after} is given something else than {before} makes")


def _embedding_of(trace: Trace) -> tuple[ModuleCall, Tensor]:
    embedding = trace.module.get_input_embeddings()
    for call in trace.calls:
        if call.module is embedding and call.output is not None:
            return call, rows_of(call.output)
    raise ModelLoadError("it does not call its embedding")


def _head_of(trace: Trace, normed: Tensor) -> ModuleCall:
    head = trace.module.get_output_embeddings()
    for call in trace.calls:
        if call.module is head and same(rows_of(some(call.input)), normed):
            return call
    raise ModelLoadError("its head is given something else than the last normalisation makes")


def _with_own(numbers: list[float], module: PreTrainedModel, layer: str) -> list[float]:
    layer_numbers = known_numbers(module.get_submodule(layer), module.config.get_text_config(), module.dtype)
    return list(dict.fromkeys((*numbers, *layer_numbers)))


def _weight_of(embedding: nn.Module) -> Tensor:
    weight = getattr(embedding, "weight", None)
    return some(weight if isinstance(weight, Tensor) else None)
