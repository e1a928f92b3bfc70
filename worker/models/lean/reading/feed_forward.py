"""What a layer's feed-forward part is: by the projections that it calls, and what lies between them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .....kernels import moe
from .....kernels.gated_activation import ACTIVATIONS, activate, activate_and_mul
from ..feed_forward import SharedExpertMlp, SparseMlp
from ..plan import FeedForwardPlan
from .matching import best, close, rows_of, same
from .trace import ModuleCall, Trace


def read_feed_forward(trace: Trace, call: ModuleCall) -> FeedForwardPlan:
    """The plan of the module that ``call`` is; the model's own code where it is nothing that is known."""
    return _dense(trace, call) or _experts(trace, call) or FeedForwardPlan(call.name)


def _dense(trace: Trace, call: ModuleCall) -> FeedForwardPlan | None:
    inner = [found for found in trace.inside(call.name) if isinstance(found.module, nn.Linear)]
    if call.given is None or call.made is None or not 2 <= len(inner) <= 3 or not same(inner[-1].made, call.made):
        return None
    *before, down = inner
    if not all(same(found.given, call.given) for found in before) or down.given is None:
        return None
    outputs = [rows_of(found.made) for found in before if found.made is not None]
    size, between = down.given.shape[-1], rows_of(down.given)
    names = tuple(found.name for found in before)
    if sum(output.shape[1] for output in outputs) == 2 * size:
        both = torch.cat(outputs, dim=1)
        chosen = best(ACTIVATIONS, lambda activation: activate_and_mul(both.clone(), activation), between)
        return None if chosen is None else FeedForwardPlan(call.name, "gated", names, down.name, chosen)
    if len(outputs) == 1 and outputs[0].shape[1] == size:
        chosen = best(ACTIVATIONS, lambda activation: activate(outputs[0].clone(), activation), between)
        return None if chosen is None else FeedForwardPlan(call.name, "plain", names, down.name, chosen)
    return None


def _experts(trace: Trace, call: ModuleCall) -> FeedForwardPlan | None:
    """A mixture that our kernels compute alike. Where they have but a reference, the model's own code is as good.

    They are asked for the device that will serve: of several ranks each reads the whole model on the host.
    """
    weight = getattr(getattr(call.module, "experts", None), "gate_up_proj", None)
    if not isinstance(weight, Tensor) or not moe.is_made_for(trace.serving_device, weight.dtype):
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
