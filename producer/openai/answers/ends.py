"""Map the ends of requests to the finish reasons of OpenAI and vLLM."""

from __future__ import annotations

from typing import Literal

from ....shared.messages.outcome import FinishReason
from ..errors import cancelled, expired

OpenAIFinishReason = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


def finish_reason_of(reason: FinishReason | None, *, has_output: bool) -> OpenAIFinishReason | None:
    """Return OpenAI's finish reason. Where it is less precise than Penstock's, that is the ``stop_reason``.

    Raises:
        OpenAIError: there is no answer: 499, the request was cancelled; 408, it expired before it had any output.
    """
    if reason is None:
        return None
    if reason in (FinishReason.CANCELLED, FinishReason.ABORT):
        raise cancelled()
    if reason == FinishReason.EXPIRED and not has_output:
        raise expired()
    return "stop" if reason in (FinishReason.STOP, FinishReason.REPETITION) else "length"


def stop_reason_of(reason: FinishReason | None, stop_reason: int | str | None) -> int | str | None:
    """Return vLLM's ``stop_reason``: the string or token id that ended the answer, or Penstock's finish reason."""
    if reason in (FinishReason.REPETITION, FinishReason.EXPIRED, FinishReason.ENGINE_LOST):
        return str(reason)
    return stop_reason
