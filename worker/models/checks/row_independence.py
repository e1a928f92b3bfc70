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
from ..lean.forward import LeanForward
from ..lean.layers.feed_forward import GatedMlp
from ..lean.layers.layer import EmbeddingPart, HeadNorm
from ..lean.layers.norms import CentredNorm
from ..lean.layers.rotation import AngleTable
from ..lean.lean_wrapper import LeanWrapper
from ..lean.native import NativeForward, products_of
from ..lean.staged import StagedForward
from ..parallel.summed import ConcatOverRanks, SumOverRanks
from ..placing.packed_linear import OwnPackedLinear

# Of transformers' Mamba-2 layers: bounds of the step, which are kept by the scan of several tokens alone.
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
    """Whether all that ``forward`` computes is by our compiled kernels, each row in an order of its own.

    Args:
        attention_backend: what attends, where attention is batch-invariant.
    """
    if forward.keeps_state:
        return False
    if isinstance(forward, NativeForward):
        return True
    lean = forward.lean if isinstance(forward, StagedForward) else forward
    return isinstance(lean, LeanForward) and attention_backend == NATIVE and _is_by_rows(lean)


def _is_by_rows(lean: LeanForward) -> bool:
    """Of a part of a model: what computes a whole one in Python has something that the compiled decoder cannot do."""
    groups = lean.groups
    return (
        groups is not None
        and groups.adds_in_order
        and isinstance(lean.network.make_angles, AngleTable)
        and all(isinstance(_inner(product), OwnPackedLinear) for product in products_of(lean.network))
        and all(_is_compiled(part) for part in lean.network.modules())
        and lean.network.plan.logit_softcap is None
        and not any(layer.attention.softcap is not None or layer.sinks is not None for layer in lean.attending_layers)
    )


def _inner(product: object) -> object:
    """What computes at this rank, in the place of which ranks have a product that they share."""
    return product.inner if isinstance(product, SumOverRanks | ConcatOverRanks) else product


def _is_compiled(part: nn.Module) -> bool:
    """Of what torch computes element by element, those at the end of a tensor may be computed otherwise."""
    if isinstance(part, GatedMlp):
        return part.is_gated and part.activation == "silu"
    is_centred = isinstance(part, CentredNorm) or (isinstance(part, HeadNorm) and part.is_centred)
    return not (is_centred or isinstance(part, EmbeddingPart))
