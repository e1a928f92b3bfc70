"""The boundary around code that works on one request: an exception of such code ends only that request.

Tokenizers, chat templates, parsers and grammars come with a model or a plug-in, and raise more than ``Exception``: a
panic in Rust, ``SystemExit`` and ``GeneratorExit`` derive from ``BaseException`` alone.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

import structlog

from ..errors import PenstockError, RequestFailedError, cut

_MAX_REASON_CHARS = 300

log = structlog.get_logger(__name__)


class Boundary:
    """A context for synchronous code that works on one request.

    Nothing is awaited in it, so even an ``asyncio.CancelledError`` is the code's own and cancels no task.

    Args:
        part: names the code in the message: "tokenizer".
        code: of the error.

    Raises, at the end of the block:
        PenstockError: as the code raised it.
        RequestFailedError: the code raised anything else.
    """

    def __init__(self, part: str, code: str) -> None:
        self._part = part
        self._code = code

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, PenstockError):
            raise RequestFailedError(f"the {self._part} failed: {describe(error)}", code=self._code) from error


def describe(error: BaseException) -> str:
    """Return the name and the message of ``error``."""
    name, message = type(error).__name__, message_of(error)
    return f"{name}: {message}" if message else name


def message_of(error: BaseException) -> str:
    """Return the message of ``error``, cut; empty if its own code fails on that."""
    try:
        return cut(str(error), _MAX_REASON_CHARS)
    except BaseException:  # nothing is awaited here, so this cancels no task
        return ""


def unforeseen(error: BaseException, ids: dict[str, str]) -> PenstockError:
    """Return the error that ends a request because of ``error``, and log its traceback.

    Args:
        ids: fields that name the request in the log.
    """
    log.error("request_failed", **ids, exc_info=error)
    return RequestFailedError(f"the request failed: {describe(error)}")


def ends_task(error: BaseException) -> bool:
    """Whether ``error`` cancels or closes the current task. Otherwise code that the task has called raised it."""
    if not isinstance(error, asyncio.CancelledError | GeneratorExit):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # the loop has ended, and its coroutines are closed
        task = None
    return task is None or task.cancelling() > 0
