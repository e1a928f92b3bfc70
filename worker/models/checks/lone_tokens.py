"""Whether a model computes a token that follows a state alone otherwise than one of several.

No trial at load tells: in 16 bits rounding is larger. But it follows from how layers are made.
"""

from __future__ import annotations

import math

from ..forward import Forward
from ..lean.forward import LeanForward
from ..lean.of_lean import OfLean

# Of transformers' Mamba-2 layers: bounds of the step, which are kept by the scan of several tokens alone.
_BOUNDS = "time_step_limit"
_NO_BOUNDS = (0.0, math.inf)


def computes_lone_tokens_otherwise(forward: Forward) -> bool:
    """Whether the result of a token depends on whether it is the only one of its request in a forward."""
    if not forward.keeps_state:
        return False
    lean = forward.lean if isinstance(forward, OfLean) else forward
    if isinstance(lean, LeanForward):
        return any(layer.weights.smallest_step > 0 for layer in lean.mixing_layers)
    bounds = [vars(part).get(_BOUNDS) for part in forward.network.modules()]
    return any(tuple(bound) != _NO_BOUNDS for bound in bounds if bound is not None)
