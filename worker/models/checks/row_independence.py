"""Whether a forward computes each token by itself, as far as its layers show it.

The bits of a token then depend neither on the other tokens of a step nor on their number. ``loading/fixed_shapes.py``
verifies it before anything relies on it. A trial at load cannot show whether a token that follows a state is computed
differently when it is the only one, because rounding in 16 bits is larger. But the layers show it.
"""

from __future__ import annotations

import math

from torch import nn

from ....kernels.dispatch import NATIVE
from ..forward import Forward
from ..lean.forward import LeanForward, LeanWrapper
from ..lean.layers.feed_forward import GatedMlp
from ..lean.layers.layer import EmbeddingPart, HeadNorm
from ..lean.layers.norms import CentredNorm
from ..lean.layers.rotation import AngleTable
from ..lean.native import NativeForward, products_of
from ..lean.staged import StagedForward, computing_layers
from ..parallel.groups import local_module
from ..placing.packed_linear import OwnPackedLinear

# In transformers' Mamba-2 layers: bounds of the step, which only the scan of several tokens applies.
_BOUNDS = "time_step_limit"
_NO_BOUNDS = (0.0, math.inf)


def computes_single_tokens_differently(forward: Forward) -> bool:
    """Whether the result of a token depends on whether it is the only one of its request in a forward."""
    if not forward.keeps_state:
        return False
    lean = forward.lean if isinstance(forward, LeanWrapper) else forward
    if isinstance(lean, LeanForward):
        return any(layer.weights.smallest_step > 0 for layer in lean.mixing_layers)
    bounds = [vars(part).get(_BOUNDS) for part in forward.network.modules()]
    return any(tuple(bound) != _NO_BOUNDS for bound in bounds if bound is not None)


def is_row_independent(forward: Forward, attention_backend: str) -> bool:
    """Whether ``forward`` is computed only by our compiled kernels, each row in a fixed order.

    Args:
        attention_backend: name of the backend, whose attention is batch-invariant.
    """
    if forward.keeps_state:
        return False
    if isinstance(computing_layers(forward), NativeForward):
        return True
    lean = forward.lean if isinstance(forward, StagedForward) else forward
    return isinstance(lean, LeanForward) and attention_backend == NATIVE and _is_python_row_independent(lean)


def _is_python_row_independent(lean: LeanForward) -> bool:
    """Whether a part of a model, run by Python, is row independent.

    A whole model that runs in Python has something that the compiled decoder does not support.
    """
    groups = lean.groups
    return (
        groups is not None
        and groups.adds_in_order
        and isinstance(lean.network.make_angles, AngleTable)
        and all(isinstance(local_module(product), OwnPackedLinear) for product in products_of(lean.network))
        and all(_is_compiled(part) for part in lean.network.modules())
        and lean.network.plan.logit_softcap is None
        and not any(layer.attention.softcap is not None or layer.sinks is not None for layer in lean.attending_layers)
    )


def _is_compiled(part: nn.Module) -> bool:
    """Whether a module is computed by our kernels. Torch may compute the last elements of a tensor differently."""
    if isinstance(part, GatedMlp):
        return part.is_gated and part.activation == "silu"
    is_centred = isinstance(part, CentredNorm) or (isinstance(part, HeadNorm) and part.is_centred)
    return not (is_centred or isinstance(part, EmbeddingPart))
