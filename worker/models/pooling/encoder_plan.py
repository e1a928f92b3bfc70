"""How an encoder is made, as data, read from a forward of a few tokens as ``lean/reading`` reads decoders."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ....kernels.paged_attention import MaskRule
from ....shared.errors import ModelLoadError
from ..lean.reading.attention import AnglesSource, read_attention, sources_of
from ..lean.reading.decoder import check_follow_each_other
from ..lean.reading.feed_forward import dense_of
from ..lean.reading.matching import close, rows_of, same
from ..lean.reading.norms import norm_after, norm_before, read_norm
from ..lean.reading.trace import AttentionTrace, ModuleCall, Trace, some
from ..plan import AnglesPlan, AttentionPlan, FeedForwardPlan, NormPlan

_LAYER = re.compile(r"(.*?)\.(\d+)(?:\.|$)")
# As far as masks are looked at, where a model has no limit of its own.
_MOST_POSITIONS = 8192


@dataclass(frozen=True)
class EncoderLayerPlan:
    """One layer.

    Args:
        attention_norm, mlp_norm: before each part, or behind it, as ``EncoderPlan.norms_follow`` says; None without.
        window: how many tokens to each side a token sees; None for all of its text.
    """

    attention: AttentionPlan
    mlp: FeedForwardPlan
    attention_norm: NormPlan | None
    mlp_norm: NormPlan | None
    window: int | None


@dataclass(frozen=True)
class EncoderPlan:
    """All of it. Names are those of modules of the base model.

    Args:
        layers_name: of the list of layers.
        norm: behind the last layer; None without.
        norms_follow: a layer's norms come behind what its parts add to the stream, and what they make is the stream.
    """

    layers_name: str
    layers: tuple[EncoderLayerPlan, ...]
    angles: tuple[AnglesPlan, ...]
    norm: NormPlan | None
    norms_follow: bool


@torch.inference_mode()
def read_encoder(base: PreTrainedModel, max_text_len: int | None, first_position: int) -> EncoderPlan:
    """Run ``base`` on a few tokens and tell how it is made; its attention has to be set anew afterwards.

    Args:
        first_position: of a text.

    Raises:
        ModelLoadError: it is made in another way than any plan says.
    """
    num_positions = max_text_len or _MOST_POSITIONS
    trace = _EncoderTrace(base, num_positions, first_position)
    whole, attentions = _layers_of(trace)
    layers = list(attentions)
    check_follow_each_other(trace, layers)
    sources = [source for call in trace.calls for source in sources_of(call, trace)]
    read = [_Layer(trace, name, attention, sources) for name, attention in attentions.items()]
    windows: dict[int, int | None] = {}
    for attention in attentions.values():
        if id(attention.mask) not in windows:
            windows[id(attention.mask)] = _window_of(attention.mask, num_positions, base.device)
    plans = (one.plan(windows[id(one.attention.mask)]) for one in read)
    last_norm = _last_norm(trace, whole, layers[-1])
    if len({one.norms_follow for one in read}) > 1 or (read[0].norms_follow and last_norm is not None):
        raise ModelLoadError("its layers normalise in two ways")
    return EncoderPlan(
        layers_name=whole,
        layers=tuple(plans),
        angles=tuple(source.plan for source in sources),
        norm=last_norm,
        norms_follow=read[0].norms_follow,
    )


class _EncoderTrace(Trace):
    """Of a base model: ``logits`` are its hidden states, and ``mask`` of an attention is transformers' rule for it."""

    def __init__(self, base: PreTrainedModel, num_positions: int, first_position: int) -> None:
        self._first_position = first_position
        super().__init__(base, num_positions, base.device)

    def _run(self) -> Tensor:
        with self.watched():
            positions = self.positions[None] + self._first_position
            return self.module(input_ids=self.token_ids[None], position_ids=positions).last_hidden_state[0]

    @staticmethod
    def _make_mask(*_: Any, mask_function: MaskRule, **__: Any) -> MaskRule:
        return mask_function


def _layers_of(trace: Trace) -> tuple[str, dict[str, AttentionTrace]]:
    """``encoder.layer``, and the attention in ``encoder.layer.3`` and its like, in their order."""
    found: dict[str, AttentionTrace] = {}
    for attention in trace.attentions:
        match = _LAYER.match(attention.name)
        if match is None or f"{match[1]}.{match[2]}" in found:
            raise ModelLoadError("its layers do not attend once each")
        found[f"{match[1]}.{match[2]}"] = attention
    lists = {name.rpartition(".")[0] for name in found}
    if len(lists) != 1:
        raise ModelLoadError("its layers are not one list")
    (whole,) = lists
    if list(found) != [f"{whole}.{index}" for index, _ in enumerate(trace.module.get_submodule(whole).children())]:
        raise ModelLoadError("its layers do not follow each other in their order")
    return whole, found


def _last_norm(trace: Trace, whole: str, last: str) -> NormPlan | None:
    result = trace.made_by(last)
    if same(result, trace.logits):
        return None
    found = norm_after([call for call in trace.calls if not call.name.startswith(f"{whole}.")], result)
    if found is None or not same(found[1], trace.logits):
        raise ModelLoadError("its last layer is followed by something else than a normalisation")
    return found[0]


class _Layer:
    """What a layer called, told apart.

    Raises:
        ModelLoadError: it is made in another way than any plan says.
    """

    def __init__(self, trace: Trace, name: str, attention: AttentionTrace, sources: list[AnglesSource]) -> None:
        self.attention = attention
        self._name = name
        inner = trace.inside(name)
        norms = [call for call in inner if read_norm(call) is not None]
        linears = [call for call in inner if isinstance(call.module, nn.Linear)]
        stream, result = trace.given_to(name), trace.made_by(name)
        (own,) = trace.of(attention.name)
        given, output = rows_of(some(own.given)), _behind(attention, linears)
        self._attention = read_attention(trace, own, sources, output)
        before = None if same(given, stream) else norm_before(norms, given, stream)
        added = stream + rows_of(some(output.made))
        behind = norm_after(norms, added)
        if behind is None or (before is None and not same(given, stream)):
            raise ModelLoadError(f"{name} does more to the stream than add to it and normalise it")
        norm, fed = behind
        ups = [call for call in linears if call is not linears[-1] and same(rows_of(some(call.given)), fed)]
        mlp = dense_of(name, [*ups, linears[-1]], some(ups[0].given)) if ups else None
        if mlp is None:
            raise ModelLoadError(f"the feed-forward part of {name} is not dense")
        self._mlp = mlp
        made = rows_of(some(linears[-1].made))
        last = norm_after(norms, fed + made)
        self.norms_follow = last is not None and same(last[1], result)
        if last is not None and self.norms_follow and before is None:
            self._norms: tuple[NormPlan | None, NormPlan] = (norm, last[0])
        elif close(added + made, result):
            self._norms = (before, norm)
        else:
            raise ModelLoadError(f"the result of {name} is not the sum of what its parts make")

    def plan(self, window: int | None) -> EncoderLayerPlan:
        """Of the layer, whose tokens see so far."""
        return EncoderLayerPlan(self._attention, self._mlp, *self._norms, window)


def _behind(attention: AttentionTrace, linears: list[ModuleCall]) -> ModuleCall:
    found = attention.found.flatten(1)
    for call in linears:
        if call.given is not None and same(rows_of(call.given), found):
            return call
    raise ModelLoadError("there is no projection behind its attention")


def _window_of(rule: MaskRule | None, num_positions: int, device: torch.device) -> int | None:
    """How many tokens to each side ``rule`` lets a token see; None for all.

    Raises:
        ModelLoadError: it is no window.
    """
    if rule is None:
        return None
    at = torch.arange(num_positions, device=device)
    asked = torch.tensor([num_positions // 2, 0, num_positions - 1], device=device)
    seen = torch.as_tensor(rule(0, 0, asked[:, None], at[None])).expand(len(asked), num_positions)
    if bool(seen.all()):
        return None
    distances = (at[None] - asked[:, None]).abs()
    window = int(distances[0][seen[0]].max()) if bool(seen[0].any()) else 0
    if not torch.equal(seen, distances <= window):
        raise ModelLoadError("what its tokens see of a text is neither all of it nor as much to each side")
    return window


def names_of_linears(plan: EncoderPlan) -> list[tuple[str, ...]]:
    """Linear layers of one input each, whose outputs are wanted side by side."""
    named = []
    for layer in plan.layers:
        named += [layer.attention.qkv, (layer.attention.output,), layer.mlp.inner, (layer.mlp.down,)]
    return named
