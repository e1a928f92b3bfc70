"""Experts beside a dense part, where both, and the router, normalise the stream each by itself (Gemma 4)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

from .....kernels.decoder import can_mix_experts
from ...plan import FeedForwardPlan, NormPlan, RouterPlan
from ..layers.feed_forward import tensor_of
from .feed_forward import CalledExperts, read_dense, read_expert, trace_experts
from .matching import best, error_of, factor_between, known_numbers, rows_of, same, tolerance_for
from .norms import norm_after, read_norm
from .trace import ModuleCall, Trace


@dataclass(frozen=True)
class ExpertsBeside:
    """Of a layer: the part, ``dense``, all tokens go through; ``made``, what comes of it and of experts.

    Args:
        calls: of which all of it consists.
    """

    plan: FeedForwardPlan
    dense: ModuleCall
    made: Tensor
    calls: list[ModuleCall]


def find_experts_beside(trace: Trace, layer: str) -> ExpertsBeside | None:
    """None where ``layer`` has no such experts, or they are not what serves."""
    inside = trace.inside(layer)
    children = [call for call in inside if call.name.count(".") == layer.count(".") + 1]
    found = next(filter(None, map(trace_experts, children)), None)
    if found is None or not can_mix_experts(trace.serving_device, found.hidden.dtype, found.num):
        return None
    # Of several that are alike, as in weights that were never trained, the one whose result it is.
    likely = sorted(children, key=lambda call: call.made is None or call.made.data_ptr() != found.hidden.data_ptr())
    before = next((call for call in likely if _makes(call, found.hidden) and read_norm(call)), None)
    if before is None or before.given is None:
        return None
    stream = rows_of(before.given)
    router, of_router = _read_router(trace, inside, stream, found)
    plan = None if router is None else read_expert(found, router)
    dense = next((call for call in children if call is not found.call and read_dense(trace, call)), None)
    if plan is None or dense is None or dense.made is None:
        return None
    (shared_norm, one), (out_norm, other) = (
        norm_after(children, rows) or (None, rows) for rows in (rows_of(dense.made), found.made)
    )
    plan = replace(
        plan, shared=read_dense(trace, dense), input_norm=read_norm(before), out_norm=out_norm, shared_norm=shared_norm
    )
    whole = FeedForwardPlan(found.call.name, "routed", beside=dense.name, experts=plan)
    return ExpertsBeside(whole, dense, one + other, [dense, found.call, *of_router])


def _makes(call: ModuleCall, rows: Tensor) -> bool:
    return call.made is not None and same(rows_of(call.made), rows)


def _read_router(
    trace: Trace, inside: list[ModuleCall], stream: Tensor, found: CalledExperts
) -> tuple[RouterPlan | None, list[ModuleCall]]:
    """Its rule, and the call of its module; None and nothing if it is not known."""
    for linear in inside:
        if not isinstance(linear.module, nn.Linear) or linear.made is None or linear.given is None:
            continue
        logits, given = rows_of(linear.made), rows_of(linear.given)
        name = linear.name.rpartition(".")[0]
        if logits.shape[1] != found.num or linear.module.bias is not None or not trace.of(name):
            continue
        own = [*trace.inside(name), *inside]  # of several that are alike its own
        for norm, plan in _norms_of(own, stream):
            scaled = _scaled(trace, name, norm, given)
            if scaled is None:
                continue
            scale, factor = scaled
            rule = RouterPlan(
                f"{linear.name}.weight", found.ids.shape[1], "softmax", renormalizes=True, rounds_weights=False
            )
            rule = replace(rule, norm=plan, input_scale=scale, input_factor=factor)
            counted = _counted(trace, name, rule, logits, found)
            return counted, trace.of(name)
    return None, []


def _norms_of(inside: list[ModuleCall], stream: Tensor) -> Iterator[tuple[Tensor, NormPlan]]:
    for call in inside:
        if call.given is not None and call.made is not None and same(rows_of(call.given), stream):
            plan = read_norm(call)
            if plan is not None:
                yield rows_of(call.made), plan


def _scaled(trace: Trace, router: str, normed: Tensor, given: Tensor) -> tuple[str, float] | None:
    """The name of a vector of the module ``router``, and a number, by which ``normed`` becomes ``given``."""
    module = trace.module.get_submodule(router)
    numbers = known_numbers(module, trace.module.config.get_text_config(), given.dtype)
    for name, vector in module.named_parameters(recurse=False):
        if vector.shape == given.shape[1:]:
            factor = factor_between(normed * vector, given, numbers)
            if factor is not None:
                return f"{router}.{name}", factor
    return None


def _counted(trace: Trace, router: str, rule: RouterPlan, logits: Tensor, found: CalledExperts) -> RouterPlan | None:
    """``rule`` with how experts come to count what they do; None in no known way."""
    module = trace.module.get_submodule(router)
    vectors = [name for name, one in module.named_parameters(recurse=False) if one.shape == (found.num,)]
    ids, scores = found.ids.long(), logits.float().softmax(-1)
    taken = scores.gather(1, ids)
    if error_of(taken.sort(-1, descending=True).values, scores.topk(rule.num_chosen).values) > tolerance_for(logits):
        return None
    guesses = [
        replace(rule, renormalizes=renormalizes, expert_scale=f"{router}.{name}" if name else "")
        for name, renormalizes in itertools.product((*vectors, ""), (True, False))
    ]

    def compute(guess: RouterPlan) -> Tensor:
        counts = taken / taken.sum(-1, keepdim=True) if guess.renormalizes else taken
        if guess.expert_scale:
            counts = counts * tensor_of(trace.module, guess.expert_scale)[ids].float()
        return counts.to(found.weights.dtype)

    chosen = best(guesses, compute, found.weights)
    return None if chosen is None else replace(chosen, rounds_weights=found.weights.dtype == logits.dtype)
