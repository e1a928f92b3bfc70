"""A feed-forward part that all tokens go through: by the projections that it calls, and what lies between them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .....kernels.gated_activation import ACTIVATIONS, activate, activate_and_mul
from ..plan import FeedForwardPlan
from .matching import best, rows_of, same
from .trace import ModuleCall, Trace


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
