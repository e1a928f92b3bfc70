"""Structure of an encoder as data, read from a forward of a few tokens as ``lean/reading`` reads decoders."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ....kernels.paged_attention import MaskRule
from ....shared.errors import ModelLoadError
from ..lean.reading.attention import AnglesSource, read_attention, sources_of
from ..lean.reading.decoder import check_follow_each_other
from ..lean.reading.feed_forward import dense_of
from ..lean.reading.norms import norm_after, norm_before, read_norm
from ..lean.reading.trace import AttentionTrace, ModuleCall, Trace, close, rows_of, same, some
from ..plan import AnglesPlan, AttentionPlan, FeedForwardPlan, NormPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYER = re.compile(r"(.*?)\.(\d+)(?:\.|$)")
# Positions for which masks are evaluated if a model has no limit.
_MOST_POSITIONS = 8192


@dataclass(frozen=True)
class EncoderLayerPlan:
    """A layer.

    Args:
        attention_norm, mlp_norm: before each part, or after it if ``EncoderPlan.norms_follow``; None for no norm.
        window: tokens to each side that a token attends to; None for the whole text.
    """

    attention: AttentionPlan
    mlp: FeedForwardPlan
    attention_norm: NormPlan | None
    mlp_norm: NormPlan | None
    window: int | None


@dataclass(frozen=True)
class EncoderPlan:
    """The whole encoder. Names are those of modules of the base model.

    Args:
        layers_name: of the list of layers.
        norm: after the last layer; None for no norm.
        norms_follow: norms follow the addition of each part to the stream, and their output is the stream.
    """

    layers_name: str
    layers: tuple[EncoderLayerPlan, ...]
    angles: tuple[AnglesPlan, ...]
    norm: NormPlan | None
    norms_follow: bool


@torch.inference_mode()
def read_encoder(base: PreTrainedModel, max_text_len: int | None, first_position: int) -> EncoderPlan:
    """Run ``base`` on a few tokens and return its plan. Its attention must be set again afterwards.

    Args:
        first_position: of a text.

    Raises:
        ModelLoadError: no plan describes it.
    """
    num_positions = max_text_len or _MOST_POSITIONS
    trace = _EncoderTrace(base, num_positions, first_position)
    list_name, attentions = _layers_of(trace)
    layers = list(attentions)
    check_follow_each_other(trace, layers)
    sources = [source for call in trace.calls for source in sources_of(call, trace)]
    read = [_Layer(trace, name, attention, sources) for name, attention in attentions.items()]
    windows: dict[int, int | None] = {}
    for attention in attentions.values():
        if id(attention.mask) not in windows:
            windows[id(attention.mask)] = _window_of(attention.mask, num_positions, base.device)
    plans = (layer.plan(windows[id(layer.attention.mask)]) for layer in read)
    last_norm = _last_norm(trace, list_name, layers[-1])
    if len({layer.norms_follow for layer in read}) > 1 or (read[0].norms_follow and last_norm is not None):
        raise ModelLoadError("its layers normalise in two ways")
    return EncoderPlan(
        layers_name=list_name,
        layers=tuple(plans),
        angles=tuple(source.plan for source in sources),
        norm=last_norm,
        norms_follow=read[0].norms_follow,
    )


class _EncoderTrace(Trace):
    """A trace of a base model: ``logits`` are its hidden states, and an attention's ``mask`` is transformers' rule."""

    def __init__(self, base: PreTrainedModel, num_positions: int, first_position: int) -> None:
        self._first_position = first_position
        super().__init__(base, num_positions, base.device)

    def _run_module(self) -> Tensor:
        with self.watched():
            positions = self.positions[None] + self._first_position
            return self.module(input_ids=self.token_ids[None], position_ids=positions).last_hidden_state[0]

    @staticmethod
    def _make_mask(*_: Any, mask_function: MaskRule, **__: Any) -> MaskRule:
        return mask_function


def _layers_of(trace: Trace) -> tuple[str, dict[str, AttentionTrace]]:
    """Return the name of the list of layers, for example ``encoder.layer``, and the attention of each layer, in
    order.
    """
    layers: dict[str, AttentionTrace] = {}
    for attention in trace.attentions:
        match = _LAYER.match(attention.name)
        if match is None or f"{match[1]}.{match[2]}" in layers:
            raise ModelLoadError("its layers do not attend once each")
        layers[f"{match[1]}.{match[2]}"] = attention
    lists = {name.rpartition(".")[0] for name in layers}
    if len(lists) != 1:
        raise ModelLoadError("its layers are not one list")
    (list_name,) = lists
    if list(layers) != [
        f"{list_name}.{index}" for index, _ in enumerate(trace.module.get_submodule(list_name).children())
    ]:
        raise ModelLoadError("its layers do not follow each other in their order")
    return list_name, layers


def _last_norm(trace: Trace, list_name: str, last: str) -> NormPlan | None:
    result = trace.output_of(last)
    if same(result, trace.logits):
        return None
    norm_and_output = norm_after([call for call in trace.calls if not call.name.startswith(f"{list_name}.")], result)
    if norm_and_output is None or not same(norm_and_output[1], trace.logits):
        raise ModelLoadError("its last layer is followed by something else than a normalisation")
    return norm_and_output[0]


class _Layer:
    """The calls of a layer by kind.

    Raises:
        ModelLoadError: no plan describes it.
    """

    def __init__(self, trace: Trace, name: str, attention: AttentionTrace, sources: list[AnglesSource]) -> None:
        self.attention = attention
        self._name = name
        inner = trace.calls_inside(name)
        norms = [call for call in inner if read_norm(call) is not None]
        linears = [call for call in inner if isinstance(call.module, nn.Linear)]
        stream, result = trace.input_of(name), trace.output_of(name)
        (attention_call,) = trace.calls_of(attention.name)
        attention_input, output = rows_of(some(attention_call.input)), _projection_after(attention, linears)
        self._attention = read_attention(trace, attention_call, sources, output)
        before = None if same(attention_input, stream) else norm_before(norms, attention_input, stream)
        added = stream + rows_of(some(output.output))
        norm_and_output = norm_after(norms, added)
        if norm_and_output is None or (before is None and not same(attention_input, stream)):
            raise ModelLoadError(f"{name} does more to the stream than add to it and normalise it")
        norm, mlp_input = norm_and_output
        ups = [call for call in linears if call is not linears[-1] and same(rows_of(some(call.input)), mlp_input)]
        mlp = dense_of(name, [*ups, linears[-1]], some(ups[0].input)) if ups else None
        if mlp is None:
            raise ModelLoadError(f"the feed-forward part of {name} is not dense")
        self._mlp = mlp
        mlp_out = rows_of(some(linears[-1].output))
        last = norm_after(norms, mlp_input + mlp_out)
        self.norms_follow = last is not None and same(last[1], result)
        if last is not None and self.norms_follow and before is None:
            self._norms: tuple[NormPlan | None, NormPlan] = (norm, last[0])
        elif close(added + mlp_out, result):
            self._norms = (before, norm)
        else:
            raise ModelLoadError(f"the result of {name} is not the sum of what its parts make")

    def plan(self, window: int | None) -> EncoderLayerPlan:
        """Return the plan of the layer with this window."""
        return EncoderLayerPlan(self._attention, self._mlp, *self._norms, window)


def _projection_after(attention: AttentionTrace, linears: list[ModuleCall]) -> ModuleCall:
    attention_out = attention.output.flatten(1)
    for call in linears:
        if call.input is not None and same(rows_of(call.input), attention_out):
            return call
    raise ModelLoadError("no projection follows its attention")


def _window_of(rule: MaskRule | None, num_positions: int, device: torch.device) -> int | None:
    """Return the number of tokens to each side that ``rule`` lets a token attend to; None for all.

    Raises:
        ModelLoadError: it is no window.
    """
    if rule is None:
        return None
    keys = torch.arange(num_positions, device=device)
    queries = torch.tensor([num_positions // 2, 0, num_positions - 1], device=device)
    is_visible = torch.as_tensor(rule(0, 0, queries[:, None], keys[None])).expand(len(queries), num_positions)
    if bool(is_visible.all()):
        return None
    distances = (keys[None] - queries[:, None]).abs()
    window = int(distances[0][is_visible[0]].max()) if bool(is_visible[0].any()) else 0
    if not torch.equal(is_visible, distances <= window):
        raise ModelLoadError("its tokens attend neither to all of a text nor to equally many tokens on each side")
    return window


def names_of_linears(plan: EncoderPlan) -> list[tuple[str, ...]]:
    """Return groups of linear layers with the same input, whose outputs are needed concatenated."""
    groups = []
    for layer in plan.layers:
        groups += [layer.attention.qkv, (layer.attention.output,), layer.mlp.inner, (layer.mlp.down,)]
    return groups
