"""Answers control calls from a table with one function per type of call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import structlog

from ...shared.control.calls import CallError, Utility, UtilityAnswer
from ...shared.errors import EngineCallError, PenstockError, UnsupportedCallError
from ...shared.messages.core import UtilityCall, UtilityOutput
from ..processes.progress import ProgressWriter

log = structlog.get_logger(__name__)


class CallAnswers:
    """Answers calls between two steps. An exception in a call becomes the answer, and the engine keeps running.

    A function that returns None has started work in the background. It is called again until it returns an answer.

    Args:
        takes_long: return whether a call may take longer than the timeout of the stall watch.
    """

    def __init__(
        self,
        functions: Mapping[type, Callable[[Any], UtilityAnswer | None]],
        progress: ProgressWriter,
        takes_long: Callable[[Utility], bool],
    ) -> None:
        self._functions = functions
        self._progress = progress
        self._takes_long = takes_long

    def answer(self, message: UtilityCall) -> UtilityOutput | None:
        """Run the call; return its answer, which may be an error, or None to be called again after the next step."""
        call = message.call
        try:
            function = self._functions.get(type(call))
            if function is None:
                raise UnsupportedCallError(f"{call.__struct_config__.tag}: this engine has no such call")
            with self._progress.compiling() if self._takes_long(call) else nullcontext():
                answer = function(call)
                return None if answer is None else UtilityOutput(message.call_id, answer=answer)
        except PenstockError as error:
            return UtilityOutput(message.call_id, CallError(error.code, str(error)))
        except Exception as error:  # from torch, the file system, or a method of the user
            log.exception("control_call_failed", call=type(call).__name__)
            return UtilityOutput(message.call_id, CallError(EngineCallError.code, f"{type(error).__name__}: {error}"))
