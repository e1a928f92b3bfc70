"""What can be asked of a server behind HTTP: little, for its own operators have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....shared.control.calls import UtilityAnswer
from ....shared.control.diagnosis import CheckInvariants, Invariants
from ....shared.control.lora import ListLoras, LoraList
from ...core.answers import CallAnswers
from ...progress import ProgressWriter
from .core import HttpCore


def http_control(core: HttpCore, num_tokens: int, progress: ProgressWriter) -> CallAnswers:
    """Answers calls about ``core``, whose server holds ``num_tokens`` in its cache."""

    def check_invariants(_: CheckInvariants) -> Invariants:
        core.check_invariants()
        num_free = round(num_tokens * (1 - core.stats().kv_cache_usage))
        return Invariants(num_free, num_tokens, core.num_unfinished_requests, 0)

    functions: dict[type, Callable[[Any], UtilityAnswer]] = {
        CheckInvariants: check_invariants,
        ListLoras: lambda _: LoraList([]),
    }
    return CallAnswers(functions, progress, lambda _: False)
