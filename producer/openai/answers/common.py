"""Common fields of answers: ids and creation times, finish reasons, and token counts."""

from __future__ import annotations

import os
import time
from typing import Literal, TypedDict

import msgspec

from ....shared.messages.outcome import FinishReason
from ....shared.messages.outcome import Usage as TokenCounts
from ..errors import cancelled, expired

# Build of the server. OpenAI's clients compare it to see whether answers to the same seed may differ.
SYSTEM_FINGERPRINT = "penstock"
# Number of digits after the prefix: time and random part; fingerprint of a body.
_NUM_DIGITS, _NUM_FINGERPRINT_DIGITS = 32, 8

OpenAIFinishReason = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


class ResponseHead(TypedDict):
    """The first fields of the bodies and chunks of one response."""

    id: str
    created: int
    model: str
    system_fingerprint: str


def response_head(response_id: str, model: str) -> ResponseHead:
    """Return the head of a response; ``created`` is derived from the id."""
    created = created_at(response_id)
    return {"id": response_id, "created": created, "model": model, "system_fingerprint": SYSTEM_FINGERPRINT}


def new_id(prefix: str, fingerprint: str = "", *, time_s: int | None = None, seed: str = "") -> str:
    """Return an id for a response. Its first eight digits after the prefix are the creation time; see ``created_at``.

    Args:
        prefix: may end with an underscore, else a dash follows it.
        fingerprint: eight digits that identify the request's body, if needed; appended.
        time_s: creation time; the current time if None.
        seed: at least 24 hexadecimal digits, from which the id is made; random ones if empty.
    """
    separator = "" if prefix.endswith("_") else "-"
    digits = (seed or os.urandom(12).hex())[:24]
    return f"{prefix}{separator}{int(time.time()) if time_s is None else time_s:08x}{digits}{fingerprint}"


def fingerprint_of(response_id: str) -> str:
    """Return the fingerprint of the body that a response belongs to; empty if its id has none."""
    digits = _digits_of(response_id)
    return digits[_NUM_DIGITS:] if len(digits) == _NUM_DIGITS + _NUM_FINGERPRINT_DIGITS else ""


def created_at(response_id: str) -> int:
    """Return the Unix time at which ``new_id`` created an id; the current time for any other id.

    So ``created`` is the same in every chunk, even if another process resumes the stream.
    """
    digits = _digits_of(response_id)
    try:
        has_time = len(digits) in (_NUM_DIGITS, _NUM_DIGITS + _NUM_FINGERPRINT_DIGITS)
        return int(digits[:8], 16) if has_time else int(time.time())
    except ValueError:
        return int(time.time())


def _digits_of(response_id: str) -> str:
    return response_id.replace("_", "-", 1).partition("-")[2]


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


class PromptTokensDetails(msgspec.Struct):
    """``cached_tokens``: prompt tokens found in the engine's cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Tokens of a prediction that are in the completions, and those that are not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct):
    """Token counts of one response. A prompt counts once for any ``n``. Details are set if there was a prediction."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def sum_of(cls, counts: list[TokenCounts]) -> Usage:
        """Return the sum over several prompts."""
        num_prompt_tokens = sum(usage.num_prompt_tokens for usage in counts)
        num_output_tokens = sum(usage.num_output_tokens for usage in counts)
        cached = PromptTokensDetails(sum(usage.num_cached_tokens for usage in counts))
        num_accepted = sum(usage.num_accepted_prediction_tokens for usage in counts)
        num_rejected = sum(usage.num_rejected_prediction_tokens for usage in counts)
        details = CompletionTokensDetails(num_accepted, num_rejected) if num_accepted or num_rejected else msgspec.UNSET
        return cls(num_prompt_tokens, num_output_tokens, num_prompt_tokens + num_output_tokens, cached, details)


class UsageCounter:
    """The usage of a stream, summed from the last deltas of all its answers."""

    def __init__(self) -> None:
        self._counts: dict[int, TokenCounts] = {}

    def add(self, prompt: int, counts: TokenCounts | None) -> None:
        """Count one answer to prompt number ``prompt``; answers to the same prompt share its tokens."""
        if counts is None:
            return
        before = self._counts.get(prompt)
        if before is not None:
            counts = TokenCounts(
                max(before.num_prompt_tokens, counts.num_prompt_tokens),
                before.num_output_tokens + counts.num_output_tokens,
                min(before.num_cached_tokens, counts.num_cached_tokens),
                before.num_accepted_prediction_tokens + counts.num_accepted_prediction_tokens,
                before.num_rejected_prediction_tokens + counts.num_rejected_prediction_tokens,
            )
        self._counts[prompt] = counts

    @property
    def usage(self) -> Usage:
        return Usage.sum_of(list(self._counts.values()))
