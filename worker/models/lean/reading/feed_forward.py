"""What a layer's feed-forward part is: dense, experts, or the model's own code."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from .....kernels import moe
from ..feed_forward import SharedExpertMlp, SparseMlp
from ..plan import FeedForwardPlan
from .dense import read_dense
from .experts import read_experts
from .matching import close, rows_of
from .trace import ModuleCall, Trace


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
