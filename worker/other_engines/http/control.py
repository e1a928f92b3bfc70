"""Control calls about an HTTP server: few, because the server is administered by its own tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....shared.control.calls import UtilityAnswer
from ....shared.control.engine import CheckInvariants, Invariants
from ....shared.control.model import ListLoras, LoraList
from ...core.answers import CallAnswers
from ...processes.progress import ProgressWriter
from .core import HttpCore


def http_control(core: HttpCore, num_tokens: int, progress: ProgressWriter) -> CallAnswers:
    """Return the handler of calls about ``core``, whose server has a cache of ``num_tokens``."""

    def check_invariants(_: CheckInvariants) -> Invariants:
        core.check_invariants()
        num_free = round(num_tokens * (1 - core.stats().kv_cache_usage))
        return Invariants(num_free, num_tokens, core.num_unfinished_requests, 0)

    functions: dict[type, Callable[[Any], UtilityAnswer]] = {
        CheckInvariants: check_invariants,
        ListLoras: lambda _: LoraList([]),
    }
    return CallAnswers(functions, progress, lambda _: False)
