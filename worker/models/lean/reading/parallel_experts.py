"""Read experts in parallel to a dense part, where both, and the router, normalise the stream separately (Gemma 4)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from .....kernels.decoder import can_mix_experts
from ...plan import FeedForwardPlan, NormPlan, RouterPlan
from ..layers.feed_forward import tensor_of
from .feed_forward import ExpertsCall, read_dense, read_expert, trace_experts
from .matching import best, error_of, factor_between, known_numbers, rows_of, same, tolerance_for
from .norms import norm_after, read_norm
from .trace import ModuleCall, Trace


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
    router, router_calls = _read_router(trace, inside, stream, experts)
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


def _read_router(
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
