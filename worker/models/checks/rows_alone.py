"""Whether a forward computes each token by itself, as far as that can be told from how it is made.

Then bits do not depend on what else is in a step, nor on how many tokens it has. Before anything relies on that,
``invariance.py`` tries it out.
"""

from __future__ import annotations

from torch import nn

from ....kernels.dispatch import NATIVE
from ..forward import Forward
from ..lean.forward import LeanForward
from ..lean.gated_mlp import GatedMlp
from ..lean.layer import EmbeddingPart, HeadNorm
from ..lean.native import NativeForward, products_of
from ..lean.norms import CentredNorm
from ..lean.rotation import AngleTable
from ..lean.staged import StagedForward
from ..packed_linear import OwnPackedLinear
from ..parallel.summed import Gathered, Summed


def computes_rows_alone(forward: Forward, attention_backend: str) -> bool:
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
    return product.inner if isinstance(product, Summed | Gathered) else product


def _is_compiled(part: nn.Module) -> bool:
    """Of what torch computes element by element, those at the end of a tensor may be computed otherwise."""
    if isinstance(part, GatedMlp):
        return part.is_gated and part.activation == "silu"
    is_centred = isinstance(part, CentredNorm) or (isinstance(part, HeadNorm) and part.is_centred)
    return not (is_centred or isinstance(part, EmbeddingPart))
