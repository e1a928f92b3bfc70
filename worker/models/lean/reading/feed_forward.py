"""Read a layer's feed-forward part: dense, a mixture of experts, or the model's own code.

A dense part is recognized by the projections that it calls and the computation between them. Of a mixture of experts
the router, one expert, and a shared expert are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor, nn

from .....kernels import moe
from .....kernels.decoder import can_mix_experts
from .....kernels.gated_activation import ACTIVATIONS, activate, activate_and_mul
from ...plan import ExpertsPlan, FeedForwardPlan, NormPlan, RouterPlan
from ..layers.feed_forward import SharedExpertMlp, SparseMlp, activate_experts, tensor_of
from .norms import norm_after, read_norm
from .trace import ModuleCall, Trace, best, close, error_of, factor_between, known_numbers, rows_of, same, tolerance_for

# Names of an expert's first weights, with a gate in them and without.
_INNER = ("gate_up_proj", "up_proj")
_DOWN = "down_proj"
# Each token goes to all of its experts for each guess, and experts of a large model have gigabytes.
_TOKENS_TRIED = 2


def read_dense(trace: Trace, call: ModuleCall) -> FeedForwardPlan | None:
    """Return the plan of ``call`` if it is a dense part; else None."""
    inner = [linear for linear in trace.calls_inside(call.name) if isinstance(linear.module, nn.Linear)]
    if call.input is None or call.output is None or not 2 <= len(inner) <= 3 or not same(inner[-1].output, call.output):
        return None
    return dense_of(call.name, inner, call.input)


def dense_of(name: str, linears: list[ModuleCall], inputs: Tensor) -> FeedForwardPlan | None:
    """Return the plan of ``linears`` applied to ``inputs``, of which the last follows the activation; None if it does
    not fit.

    Args:
        name: of the module that contains them.
    """
    *before, down = linears
    if not all(same(linear.input, inputs) for linear in before) or down.input is None:
        return None
    outputs = [rows_of(linear.output) for linear in before if linear.output is not None]
    size, between = down.input.shape[-1], rows_of(down.input)
    names = tuple(linear.name for linear in before)
    if sum(output.shape[1] for output in outputs) == 2 * size:
        both = torch.cat(outputs, dim=1)
        chosen = best(ACTIVATIONS, lambda activation: activate_and_mul(both.clone(), activation), between)
        return None if chosen is None else FeedForwardPlan(name, "gated", names, down.name, chosen)
    if len(outputs) == 1 and outputs[0].shape[1] == size:
        chosen = best(ACTIVATIONS, lambda activation: activate(outputs[0].clone(), activation), between)
        return None if chosen is None else FeedForwardPlan(name, "plain", names, down.name, chosen)
    return None


@dataclass(frozen=True)
class ExpertsCall:
    """A call of the module that holds experts: its tokens, their experts and weights, and the result."""

    call: ModuleCall
    inner: str
    hidden: Tensor
    ids: Tensor
    weights: Tensor
    output: Tensor

    @property
    def num(self) -> int:
        return len(getattr(self.call.module, _DOWN))


def read_experts(trace: Trace, call: ModuleCall, beside: ModuleCall | None = None) -> FeedForwardPlan | None:
    """Return the plan of a mixture of experts that the compiled decoder supports; None for others, or if it will not
    serve.

    Args:
        beside: a second part with the same input, whose result the layer adds.
    """
    experts = next(filter(None, (_experts_of(each, call) for each in trace.calls_inside(call.name))), None)
    if experts is None or not can_mix_experts(trace.serving_device, experts.hidden.dtype, experts.num):
        return None
    router = _read_router(trace, call, experts)
    plan = None if router is None else read_expert(experts, router)
    if plan is None:
        return None
    with_shared = _with_shared(trace, call, experts, plan, beside)
    return None if with_shared is None else FeedForwardPlan(call.name, "routed", experts=with_shared)


def _experts_of(call: ModuleCall, block: ModuleCall) -> ExpertsCall | None:
    """Return the call of experts if ``call`` is one, a part of ``block``, and has the same input; else None."""
    if call.name.rpartition(".")[0] != block.name or block.input is None:
        return None
    return trace_experts(call, rows_of(block.input))


def trace_experts(call: ModuleCall, hidden: Tensor | None = None) -> ExpertsCall | None:
    """Return the call of experts if the module of ``call`` holds some; else None.

    Args:
        hidden: ``[T, E]``, the input that they must have; None for any.
    """
    if call.output is None:
        return None
    inner = next((name for name in _INNER if _is_of_experts(getattr(call.module, name, None))), None)
    if inner is None or not _is_of_experts(getattr(call.module, _DOWN, None)):
        return None
    tensors = [rows_of(value) for value in (*call.arguments, *call.options.values()) if isinstance(value, Tensor)]
    rows = (value for value in tensors if value.is_floating_point() and value.shape == rows_of(call.output).shape)
    tokens = next((value for value in rows if hidden is None or same(value, hidden)), None)
    ids = next((value for value in tensors if not value.is_floating_point() and value.ndim == 2), None)
    if tokens is None or ids is None:
        return None
    weights = next((value for value in tensors if value.is_floating_point() and value.shape == ids.shape), None)
    if weights is None:
        return None
    return ExpertsCall(call, inner, tokens, ids, weights, rows_of(call.output))


def _is_of_experts(tensor: Any) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.ndim == 3


def _read_router(trace: Trace, block: ModuleCall, experts: ExpertsCall) -> RouterPlan | None:
    """Return the routing rule that comes closest to the ids and weights of ``experts``; None if none is close."""
    numbers = known_numbers(block.module, trace.module.config.get_text_config(), experts.hidden.dtype)
    chosen, least = None, tolerance_for(experts.hidden)
    for guess in _routers(block, experts):
        rough, missed = _weights_by(trace.module, guess, experts)
        scale = factor_between(rough.to(experts.hidden.dtype), experts.weights.to(experts.hidden.dtype), numbers)
        if scale is None:
            continue
        # Rounded as the model does, so that of two nearly equal guesses the right one is exact.
        error = max(missed, error_of((rough * scale).to(experts.weights.dtype), experts.weights))
        if error < least:
            chosen, least = replace(guess, scale=scale), error
    return chosen


def _routers(block: ModuleCall, experts: ExpertsCall) -> Iterator[RouterPlan]:
    """Yield the possible rules, those in which all tensors matter first, since zeros cannot be distinguished from
    none.
    """
    tensors = itertools.chain(block.module.named_parameters(), block.module.named_buffers())
    tensors = [(name, tensor) for name, tensor in tensors if not experts.call.name.endswith(f".{name.split('.')[0]}")]
    weights = [name for name, tensor in tensors if tensor.shape == (experts.num, experts.hidden.shape[1])]
    biases = [f"{block.name}.{name}" for name, tensor in tensors if tensor.numel() == experts.num]
    places = [*((name, "") for name in biases), *(("", name) for name in biases), ("", "")]
    rounds_weights = experts.weights.dtype == experts.hidden.dtype
    for weight, (bias, choice_bias), scoring, renormalizes, is_wide in itertools.product(
        weights, places, ("softmax", "sigmoid"), (True, False), (False, True)
    ):
        yield RouterPlan(
            f"{block.name}.{weight}",
            experts.ids.shape[1],
            scoring,
            renormalizes,
            bias=bias,
            choice_bias=choice_bias,
            is_wide=is_wide,
            rounds_weights=rounds_weights,
        )


def _weights_by(model: nn.Module, plan: RouterPlan, experts: ExpertsCall) -> tuple[Tensor, float]:
    """Return the weights that ``plan`` computes for the experts that the model chose, without ``scale``, ``[T, J]``.

    Also returns how far their scores are from the best ones: of equal experts the model may choose others than
    ``kernels.moe``.
    """
    dtype = torch.float32 if plan.is_wide else experts.hidden.dtype
    weight, bias, choice_bias = (
        tensor_of(model, name).detach() if name else None for name in (plan.weight, plan.bias, plan.choice_bias)
    )
    assert weight is not None
    bias = None if bias is None else bias.flatten().to(dtype)
    logits = F.linear(experts.hidden.to(dtype), weight.to(dtype), bias).float()
    scores = logits.softmax(-1) if plan.scoring == "softmax" else logits.sigmoid()
    choice_scores = scores if choice_bias is None else scores + choice_bias.flatten().float()
    ids = experts.ids.long()
    chosen_scores = choice_scores.gather(1, ids).sort(-1, descending=True).values
    weights = scores.gather(1, ids)
    if plan.renormalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, error_of(chosen_scores, choice_scores.topk(plan.num_chosen).values)


def read_expert(experts: ExpertsCall, router: RouterPlan) -> ExpertsPlan | None:
    """Return the layout of the experts' weights, and the computation between them; None if it is unknown."""
    module: Any = experts.call.module
    inner, down = getattr(module, experts.inner), getattr(module, _DOWN)
    size = experts.hidden.shape[1]
    numbers = [value for value in vars(module).values() if isinstance(value, float) and value > 0]
    guesses = []
    for is_transposed in (False, True):
        axis = 1 if is_transposed else 2
        if inner.shape[axis] != size or down.shape[3 - axis] != size:
            continue
        is_gated = inner.shape[3 - axis] == 2 * down.shape[axis]
        if not is_gated and inner.shape[3 - axis] != down.shape[axis]:
            continue
        plan = ExpertsPlan(experts.call.name, router, experts.inner, _DOWN, is_transposed, is_gated=is_gated)
        guesses += [replace(plan, activation=activation) for activation in ACTIVATIONS]
        guesses += [replace(plan, clamp=clamp) for clamp in itertools.permutations(numbers, 2) if is_gated]
    return best(guesses, lambda guess: _compute_experts(guess, experts), experts.output[:_TOKENS_TRIED])


def _compute_experts(plan: ExpertsPlan, experts: ExpertsCall) -> Tensor:
    output = torch.zeros_like(experts.hidden[:_TOKENS_TRIED], dtype=torch.float32)
    for token, expert_ids in enumerate(experts.ids[:_TOKENS_TRIED].tolist()):
        for place, expert in enumerate(expert_ids):
            inner = _multiply(plan, experts, plan.inner, expert, experts.hidden[token : token + 1])
            down = _multiply(plan, experts, plan.down, expert, activate_experts(plan, inner))
            output[token] += experts.weights[token, place].float() * down[0].float()
    return output.to(experts.output.dtype)


def _multiply(plan: ExpertsPlan, experts: ExpertsCall, name: str, expert: int, rows: Tensor) -> Tensor:
    module: Any = experts.call.module
    weight, bias = getattr(module, name)[expert], getattr(module, f"{name}_bias", None)
    return F.linear(rows, weight.T if plan.is_transposed else weight, None if bias is None else bias[expert])


def _with_shared(
    trace: Trace, block: ModuleCall, experts: ExpertsCall, plan: ExpertsPlan, beside: ModuleCall | None
) -> ExpertsPlan | None:
    """Return ``plan`` with the shared dense part, if there is one; None if the rest is something else."""
    if block.output is None:
        return None
    output = rows_of(block.output)
    if beside is not None:
        dense = read_dense(trace, beside) if close(experts.output, output) else None
        return None if dense is None else replace(plan, shared=dense)
    if close(experts.output, output):
        return plan
    inside = [call for call in trace.calls_inside(block.name) if same(_rows(call.input), experts.hidden)]
    for call in inside:
        dense = read_dense(trace, call)
        if dense is None or call.output is None:
            continue
        added = rows_of(call.output)
        if close(experts.output + added, output):
            return replace(plan, shared=dense)
        gates = [gate for gate in inside if isinstance(gate.module, nn.Linear) and gate.module.out_features == 1]
        for gate in gates:
            gate_logits = _rows(gate.output)
            if gate_logits is not None and close(experts.output + gate_logits.sigmoid() * added, output):
                return replace(plan, shared=dense, shared_gate=gate.name)
    return None


def _rows(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else rows_of(tensor)


def read_feed_forward(trace: Trace, call: ModuleCall) -> FeedForwardPlan:
    """Return the plan of the module ``call``; for an unknown one that of the model's own code."""
    dense = read_dense(trace, call)
    return dense or read_experts(trace, call) or _experts(trace, call) or FeedForwardPlan(call.name)


def read_both(trace: Trace, first: ModuleCall, second: ModuleCall) -> FeedForwardPlan:
    """Return the plan of two modules with the same input, whose results a layer adds."""
    for call, beside in ((first, second), (second, first)):
        plan = read_experts(trace, call, beside)
        if plan is not None:
            return replace(plan, beside=beside.name)
    return FeedForwardPlan(first.name, beside=second.name)


def _experts(trace: Trace, call: ModuleCall) -> FeedForwardPlan | None:
    """Return the plan of a mixture that our kernels compute equally; None if they have only a reference, which is no
    faster than the model's own code.

    Kernels are looked up for the serving device, since of several ranks each reads the whole model on the host.
    """
    weight = getattr(getattr(call.module, "experts", None), "gate_up_proj", None)
    if not isinstance(weight, Tensor) or not moe.has_kernel(trace.serving_device, weight.dtype):
        return None
    assert call.input is not None
    assert call.output is not None
    for kind, make in (("experts", SparseMlp), ("experts and a shared one", SharedExpertMlp)):
        try:
            output = make(call.module)(rows_of(call.input))
        except (AttributeError, RuntimeError, ValueError, TypeError):  # it consists of other parts
            continue
        if close(output, rows_of(call.output)):
            return FeedForwardPlan(call.name, kind)
    return None


@dataclass(frozen=True)
class ParallelExperts:
    """The experts and the dense part of a layer.

    Args:
        dense: the part that all tokens go through.
        output: the sum of both.
        calls: the calls they consist of.
    """

    plan: FeedForwardPlan
    dense: ModuleCall
    output: Tensor
    calls: list[ModuleCall]


def find_parallel_experts(trace: Trace, layer: str) -> ParallelExperts | None:
    """Find such experts in ``layer``; None if there are none, or they will not serve."""
    inside = trace.calls_inside(layer)
    children = [call for call in inside if call.name.count(".") == layer.count(".") + 1]
    experts = next(filter(None, map(trace_experts, children)), None)
    if experts is None or not can_mix_experts(trace.serving_device, experts.hidden.dtype, experts.num):
        return None
    # If several norms have equal outputs, as with untrained weights, take the one whose result it is.
    likely = sorted(
        children, key=lambda call: call.output is None or call.output.data_ptr() != experts.hidden.data_ptr()
    )
    before = next((call for call in likely if _makes(call, experts.hidden) and read_norm(call)), None)
    if before is None or before.input is None:
        return None
    stream = rows_of(before.input)
    router, router_calls = _read_parallel_router(trace, inside, stream, experts)
    plan = None if router is None else read_expert(experts, router)
    dense = next((call for call in children if call is not experts.call and read_dense(trace, call)), None)
    if plan is None or dense is None or dense.output is None:
        return None
    (shared_norm, shared_rows), (out_norm, expert_rows) = (
        norm_after(children, rows) or (None, rows) for rows in (rows_of(dense.output), experts.output)
    )
    plan = replace(
        plan, shared=read_dense(trace, dense), input_norm=read_norm(before), out_norm=out_norm, shared_norm=shared_norm
    )
    whole = FeedForwardPlan(experts.call.name, "routed", beside=dense.name, experts=plan)
    return ParallelExperts(whole, dense, shared_rows + expert_rows, [dense, experts.call, *router_calls])


def _makes(call: ModuleCall, rows: Tensor) -> bool:
    return call.output is not None and same(rows_of(call.output), rows)


def _read_parallel_router(
    trace: Trace, inside: list[ModuleCall], stream: Tensor, experts: ExpertsCall
) -> tuple[RouterPlan | None, list[ModuleCall]]:
    """Return the router's rule and the calls of its module; None and an empty list if it is not known."""
    for linear in inside:
        if not isinstance(linear.module, nn.Linear) or linear.output is None or linear.input is None:
            continue
        logits, inputs = rows_of(linear.output), rows_of(linear.input)
        name = linear.name.rpartition(".")[0]
        if logits.shape[1] != experts.num or linear.module.bias is not None or not trace.calls_of(name):
            continue
        candidates = [*trace.calls_inside(name), *inside]  # of several equal ones the router's own first
        for norm, plan in _norms_of(candidates, stream):
            scaled = _scaled(trace, name, norm, inputs)
            if scaled is None:
                continue
            scale, factor = scaled
            rule = RouterPlan(
                f"{linear.name}.weight", experts.ids.shape[1], "softmax", renormalizes=True, rounds_weights=False
            )
            rule = replace(rule, norm=plan, input_scale=scale, input_factor=factor)
            complete_rule = _with_weighting(trace, name, rule, logits, experts)
            return complete_rule, trace.calls_of(name)
    return None, []


def _norms_of(inside: list[ModuleCall], stream: Tensor) -> Iterator[tuple[Tensor, NormPlan]]:
    for call in inside:
        if call.input is not None and call.output is not None and same(rows_of(call.input), stream):
            plan = read_norm(call)
            if plan is not None:
                yield rows_of(call.output), plan


def _scaled(trace: Trace, router: str, normed: Tensor, inputs: Tensor) -> tuple[str, float] | None:
    """Return the name of a vector of the module ``router``, and a number, whose product with ``normed`` is
    ``inputs``.
    """
    module = trace.module.get_submodule(router)
    numbers = known_numbers(module, trace.module.config.get_text_config(), inputs.dtype)
    for name, vector in module.named_parameters(recurse=False):
        if vector.shape == inputs.shape[1:]:
            factor = factor_between(normed * vector, inputs, numbers)
            if factor is not None:
                return f"{router}.{name}", factor
    return None


def _with_weighting(
    trace: Trace, router: str, rule: RouterPlan, logits: Tensor, experts: ExpertsCall
) -> RouterPlan | None:
    """Return ``rule`` completed with the computation of expert weights; None if it is not known."""
    module = trace.module.get_submodule(router)
    vectors = [name for name, vector in module.named_parameters(recurse=False) if vector.shape == (experts.num,)]
    ids, scores = experts.ids.long(), logits.float().softmax(-1)
    chosen_scores = scores.gather(1, ids)
    if error_of(chosen_scores.sort(-1, descending=True).values, scores.topk(rule.num_chosen).values) > tolerance_for(
        logits
    ):
        return None
    guesses = [
        replace(rule, renormalizes=renormalizes, expert_scale=f"{router}.{name}" if name else "")
        for name, renormalizes in itertools.product((*vectors, ""), (True, False))
    ]

    def compute(guess: RouterPlan) -> Tensor:
        weights = chosen_scores / chosen_scores.sum(-1, keepdim=True) if guess.renormalizes else chosen_scores
        if guess.expert_scale:
            weights = weights * tensor_of(trace.module, guess.expert_scale)[ids].float()
        return weights.to(experts.weights.dtype)

    chosen = best(guesses, compute, experts.weights)
    return None if chosen is None else replace(chosen, rounds_weights=experts.weights.dtype == logits.dtype)
