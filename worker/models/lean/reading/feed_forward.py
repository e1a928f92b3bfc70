"""Read a layer's feed-forward part: dense, a mixture of experts, or the model's own code.

A dense part is recognized by the projections that it calls and the computation between them. Of a mixture of experts
the router, one expert, and a shared expert are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....kernels import moe
from .....kernels.decoder import can_mix_experts
from .....kernels.gated_activation import ACTIVATIONS, activate, activate_and_mul
from ...plan import ExpertsPlan, FeedForwardPlan, RouterPlan
from ..layers.feed_forward import SharedExpertMlp, SparseMlp, activate_experts, tensor_of
from .matching import best, close, error_of, factor_between, known_numbers, rows_of, same, tolerance_for
from .trace import ModuleCall, Trace

# What an expert's first weights are called, with a gate in them and without.
_INNER = ("gate_up_proj", "up_proj")
_DOWN = "down_proj"
# Each goes to as many experts as it has, in each way that is tried; of a large model they have gigabytes.
_TOKENS_TRIED = 2


def read_dense(trace: Trace, call: ModuleCall) -> FeedForwardPlan | None:
    """The plan of ``call``; None if it is something else."""
    inner = [found for found in trace.inside(call.name) if isinstance(found.module, nn.Linear)]
    if call.given is None or call.made is None or not 2 <= len(inner) <= 3 or not same(inner[-1].made, call.made):
        return None
    return dense_of(call.name, inner, call.given)


def dense_of(name: str, linears: list[ModuleCall], given: Tensor) -> FeedForwardPlan | None:
    """The plan of what ``linears`` make of ``given``, the last of them being the one behind the activation; None if it
    is something else.

    Args:
        name: of the module that they are in.
    """
    *before, down = linears
    if not all(same(found.given, given) for found in before) or down.given is None:
        return None
    outputs = [rows_of(found.made) for found in before if found.made is not None]
    size, between = down.given.shape[-1], rows_of(down.given)
    names = tuple(found.name for found in before)
    if sum(output.shape[1] for output in outputs) == 2 * size:
        both = torch.cat(outputs, dim=1)
        chosen = best(ACTIVATIONS, lambda activation: activate_and_mul(both.clone(), activation), between)
        return None if chosen is None else FeedForwardPlan(name, "gated", names, down.name, chosen)
    if len(outputs) == 1 and outputs[0].shape[1] == size:
        chosen = best(ACTIVATIONS, lambda activation: activate(outputs[0].clone(), activation), between)
        return None if chosen is None else FeedForwardPlan(name, "plain", names, down.name, chosen)
    return None


@dataclass(frozen=True)
class CalledExperts:
    """A call of the module that holds experts: its tokens, where they went, and what came of it."""

    call: ModuleCall
    inner: str
    hidden: Tensor
    ids: Tensor
    weights: Tensor
    made: Tensor

    @property
    def num(self) -> int:
        return len(getattr(self.call.module, _DOWN))


def read_experts(trace: Trace, call: ModuleCall, beside: ModuleCall | None = None) -> FeedForwardPlan | None:
    """The plan of a mixture that the compiled decoder has; None if ``call`` is none, or it is not what serves.

    Args:
        beside: a second part of the same input, whose result the layer adds.
    """
    found = next(filter(None, (_experts_of(each, call) for each in trace.inside(call.name))), None)
    if found is None or not can_mix_experts(trace.serving_device, found.hidden.dtype, found.num):
        return None
    router = _read_router(trace, call, found)
    plan = None if router is None else read_expert(found, router)
    if plan is None:
        return None
    with_shared = _with_shared(trace, call, found, plan, beside)
    return None if with_shared is None else FeedForwardPlan(call.name, "routed", experts=with_shared)


def _experts_of(call: ModuleCall, block: ModuleCall) -> CalledExperts | None:
    """What ``call`` is told, if its module holds experts and is a part of ``block``, whose input it is given."""
    if call.name.rpartition(".")[0] != block.name or block.given is None:
        return None
    return trace_experts(call, rows_of(block.given))


def trace_experts(call: ModuleCall, hidden: Tensor | None = None) -> CalledExperts | None:
    """What ``call`` is told, if its module holds experts.

    Args:
        hidden: ``[T, E]``, what they are to be given; None for anything.
    """
    if call.made is None:
        return None
    inner = next((name for name in _INNER if _is_of_experts(getattr(call.module, name, None))), None)
    if inner is None or not _is_of_experts(getattr(call.module, _DOWN, None)):
        return None
    given = [rows_of(value) for value in (*call.arguments, *call.options.values()) if isinstance(value, Tensor)]
    rows = (value for value in given if value.is_floating_point() and value.shape == rows_of(call.made).shape)
    found = next((value for value in rows if hidden is None or same(value, hidden)), None)
    ids = next((value for value in given if not value.is_floating_point() and value.ndim == 2), None)
    if found is None or ids is None:
        return None
    weights = next((value for value in given if value.is_floating_point() and value.shape == ids.shape), None)
    if weights is None:
        return None
    return CalledExperts(call, inner, found, ids, weights, rows_of(call.made))


def _is_of_experts(tensor: Any) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.ndim == 3


def _read_router(trace: Trace, block: ModuleCall, found: CalledExperts) -> RouterPlan | None:
    """The rule by which the ids and weights of ``found`` come from its tokens: whatever makes the nearest."""
    numbers = known_numbers(block.module, trace.module.config.get_text_config(), found.hidden.dtype)
    chosen, least = None, tolerance_for(found.hidden)
    for guess in _routers(block, found):
        rough, missed = _counts_by(trace.module, guess, found)
        scale = factor_between(rough.to(found.hidden.dtype), found.weights.to(found.hidden.dtype), numbers)
        if scale is None:
            continue
        # Rounded as the model does, so that of two guesses which are nearly the same the right one is equal.
        error = max(missed, error_of((rough * scale).to(found.weights.dtype), found.weights))
        if error < least:
            chosen, least = replace(guess, scale=scale), error
    return chosen


def _routers(block: ModuleCall, found: CalledExperts) -> Iterator[RouterPlan]:
    """What might be, first that whose tensors all count: those that are zero cannot be told from none."""
    tensors = itertools.chain(block.module.named_parameters(), block.module.named_buffers())
    tensors = [(name, tensor) for name, tensor in tensors if not found.call.name.endswith(f".{name.split('.')[0]}")]
    weights = [name for name, tensor in tensors if tensor.shape == (found.num, found.hidden.shape[1])]
    biases = [f"{block.name}.{name}" for name, tensor in tensors if tensor.numel() == found.num]
    places = [*((name, "") for name in biases), *(("", name) for name in biases), ("", "")]
    rounds_weights = found.weights.dtype == found.hidden.dtype
    for weight, (bias, choice_bias), scoring, renormalizes, is_wide in itertools.product(
        weights, places, ("softmax", "sigmoid"), (True, False), (False, True)
    ):
        yield RouterPlan(
            f"{block.name}.{weight}",
            found.ids.shape[1],
            scoring,
            renormalizes,
            bias=bias,
            choice_bias=choice_bias,
            is_wide=is_wide,
            rounds_weights=rounds_weights,
        )


def _counts_by(own: nn.Module, plan: RouterPlan, found: CalledExperts) -> tuple[Tensor, float]:
    """What the experts of ``found`` would count, but for ``scale``, ``[T, J]``; and how far they are from the best.

    Of equal ones the model may take others than ``kernels.moe`` would.
    """
    dtype = torch.float32 if plan.is_wide else found.hidden.dtype
    weight, bias, choice_bias = (
        tensor_of(own, name).detach() if name else None for name in (plan.weight, plan.bias, plan.choice_bias)
    )
    assert weight is not None
    bias = None if bias is None else bias.flatten().to(dtype)
    logits = F.linear(found.hidden.to(dtype), weight.to(dtype), bias).float()
    scores = logits.softmax(-1) if plan.scoring == "softmax" else logits.sigmoid()
    wanted = scores if choice_bias is None else scores + choice_bias.flatten().float()
    ids = found.ids.long()
    taken = wanted.gather(1, ids).sort(-1, descending=True).values
    counts = scores.gather(1, ids)
    if plan.renormalizes:
        counts = counts / counts.sum(-1, keepdim=True)
    return counts, error_of(taken, wanted.topk(plan.num_chosen).values)


def read_expert(found: CalledExperts, router: RouterPlan) -> ExpertsPlan | None:
    """How the weights of experts lie, and what is between them."""
    own: Any = found.call.module
    inner, down = getattr(own, found.inner), getattr(own, _DOWN)
    size = found.hidden.shape[1]
    numbers = [value for value in vars(own).values() if isinstance(value, float) and value > 0]
    guesses = []
    for is_transposed in (False, True):
        axis = 1 if is_transposed else 2
        if inner.shape[axis] != size or down.shape[3 - axis] != size:
            continue
        is_gated = inner.shape[3 - axis] == 2 * down.shape[axis]
        if not is_gated and inner.shape[3 - axis] != down.shape[axis]:
            continue
        plan = ExpertsPlan(found.call.name, router, found.inner, _DOWN, is_transposed, is_gated=is_gated)
        guesses += [replace(plan, activation=activation) for activation in ACTIVATIONS]
        guesses += [replace(plan, clamp=clamp) for clamp in itertools.permutations(numbers, 2) if is_gated]
    return best(guesses, lambda guess: _made_by(guess, found), found.made[:_TOKENS_TRIED])


def _made_by(plan: ExpertsPlan, found: CalledExperts) -> Tensor:
    made = torch.zeros_like(found.hidden[:_TOKENS_TRIED], dtype=torch.float32)
    for token, experts in enumerate(found.ids[:_TOKENS_TRIED].tolist()):
        for place, expert in enumerate(experts):
            inner = _multiply(plan, found, plan.inner, expert, found.hidden[token : token + 1])
            down = _multiply(plan, found, plan.down, expert, activate_experts(plan, inner))
            made[token] += found.weights[token, place].float() * down[0].float()
    return made.to(found.made.dtype)


def _multiply(plan: ExpertsPlan, found: CalledExperts, name: str, expert: int, rows: Tensor) -> Tensor:
    own: Any = found.call.module
    weight, bias = getattr(own, name)[expert], getattr(own, f"{name}_bias", None)
    return F.linear(rows, weight.T if plan.is_transposed else weight, None if bias is None else bias[expert])


def _with_shared(
    trace: Trace, block: ModuleCall, found: CalledExperts, plan: ExpertsPlan, beside: ModuleCall | None
) -> ExpertsPlan | None:
    """With the dense part beside the experts, if there is one; None if there is something else."""
    if block.made is None:
        return None
    made = rows_of(block.made)
    if beside is not None:
        dense = read_dense(trace, beside) if close(found.made, made) else None
        return None if dense is None else replace(plan, shared=dense)
    if close(found.made, made):
        return plan
    inside = [call for call in trace.inside(block.name) if same(_rows(call.given), found.hidden)]
    for call in inside:
        dense = read_dense(trace, call)
        if dense is None or call.made is None:
            continue
        added = rows_of(call.made)
        if close(found.made + added, made):
            return replace(plan, shared=dense)
        gates = [gate for gate in inside if isinstance(gate.module, nn.Linear) and gate.module.out_features == 1]
        for gate in gates:
            opened = _rows(gate.made)
            if opened is not None and close(found.made + opened.sigmoid() * added, made):
                return replace(plan, shared=dense, shared_gate=gate.name)
    return None


def _rows(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else rows_of(tensor)


def read_feed_forward(trace: Trace, call: ModuleCall) -> FeedForwardPlan:
    """The plan of the module that ``call`` is; the model's own code where it is nothing that is known."""
    dense = read_dense(trace, call)
    return dense or read_experts(trace, call) or _experts(trace, call) or FeedForwardPlan(call.name)


def read_both(trace: Trace, first: ModuleCall, second: ModuleCall) -> FeedForwardPlan:
    """The plan of two modules of the same input, whose results a layer adds."""
    for call, beside in ((first, second), (second, first)):
        found = read_experts(trace, call, beside)
        if found is not None:
            return replace(found, beside=beside.name)
    return FeedForwardPlan(first.name, beside=second.name)


def _experts(trace: Trace, call: ModuleCall) -> FeedForwardPlan | None:
    """A mixture that our kernels compute alike. Where they have but a reference, the model's own code is as good.

    They are asked for the device that will serve: of several ranks each reads the whole model on the host.
    """
    weight = getattr(getattr(call.module, "experts", None), "gate_up_proj", None)
    if not isinstance(weight, Tensor) or not moe.has_kernel(trace.serving_device, weight.dtype):
        return None
    assert call.given is not None
    assert call.made is not None
    for kind, make in (("experts", SparseMlp), ("experts and a shared one", SharedExpertMlp)):
        try:
            found = make(call.module)(rows_of(call.given))
        except (AttributeError, RuntimeError, ValueError, TypeError):  # it is made of other parts
            continue
        if close(found, rows_of(call.made)):
            return FeedForwardPlan(call.name, kind)
    return None
