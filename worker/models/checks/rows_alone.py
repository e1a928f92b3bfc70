"""Whether a forward computes each token by itself, as far as that can be told from how it is made.

Then bits do not depend on what else is in a step, nor on how many tokens it has. Before anything relies on that,
``invariance.py`` tries it out.
"""

from __future__ import annotations

from ....kernels.dispatch import NATIVE
from ..forward import Forward
from ..lean.forward import LeanForward
from ..lean.native import NativeForward, products_of
from ..lean.staged import StagedForward
from ..packed_linear import OwnPackedLinear
from ..parallel.summed import Gathered, Summed


def computes_rows_alone(forward: Forward, attention_backend: str) -> bool:
    """Whether all products and attentions of ``forward`` are by our compiled kernels, each row in an order of its own.

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
        and all(isinstance(_inner(product), OwnPackedLinear) for product in products_of(lean.network))
        and not any(layer.attention.softcap is not None or layer.sinks is not None for layer in lean.attending_layers)
    )


def _inner(product: object) -> object:
    """What computes at this rank, in the place of which ranks have a product that they share."""
    return product.inner if isinstance(product, Summed | Gathered) else product
