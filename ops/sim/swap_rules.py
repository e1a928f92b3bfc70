"""Rules by which models share an engine, to compare Penstock's with. They have the signature of ``rule.decide``.

Both drain: a model is left after its running requests have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...shared.swap.rule import Debts, Reason, Stay, Swap, decide
from ...shared.swap.views import DeviceView, ModelView, SwapOptions
from .scenario import SwapRule

Decide = Callable[[float, DeviceView, Sequence[ModelView], Debts, SwapOptions], Swap | Stay]


def decide_first_come(
    now_s: float, device: DeviceView, models: Sequence[ModelView], debts: Debts, options: SwapOptions
) -> Swap | Stay:
    """Serve requests in order of arrival, whichever model they need. Their model claims none that came later."""
    return _drain(models, lambda awake, oldest_s: awake.num_running > 0 or _oldest_s(awake) <= oldest_s)


def decide_like_llama_swap(
    now_s: float, device: DeviceView, models: Sequence[ModelView], debts: Debts, options: SwapOptions
) -> Swap | Stay:
    """Leave a model when it has no request, for the one with the oldest: llama-swap's rule without its limit of 10."""
    return _drain(models, lambda awake, oldest_s: awake.has_work)


def _drain(models: Sequence[ModelView], stays: Callable[[ModelView, float], bool]) -> Swap | Stay:
    standing = [model for model in models if not model.is_awake and model.oldest_s and model.can_wake]
    if not standing:
        return Stay()
    entering = min(standing, key=_oldest_s)
    awake = [model for model in models if model.is_awake]
    if any(stays(model, _oldest_s(entering)) for model in awake):
        return Stay()
    return Swap(Reason.EMPTY, tuple(model.name for model in awake), entering=entering.name)


def _oldest_s(model: ModelView) -> float:
    return min(model.oldest_s.values(), default=float("inf"))


RULES: dict[SwapRule, Decide] = {
    SwapRule.STANDING: decide,
    SwapRule.FIRST_COME: decide_first_come,
    SwapRule.LLAMA_SWAP: decide_like_llama_swap,
}
