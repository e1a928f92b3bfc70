"""The outcome of a request, for several messages: its end, its error, its token counts and probabilities."""

from __future__ import annotations

import enum

import msgspec


class FinishReason(enum.StrEnum):
    """Reason of a request's end. The first five are vLLM's; the others are distinct from "abort" and "length"."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    ENGINE_LOST = "engine_lost"
    POISONED = "poisoned"


class RequestError(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """Error of one request; ``code`` is that of an exception class in ``errors``."""

    code: str
    message: str
    retryable: bool = False


class Usage(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """Token counts of a request; recomputed tokens (preemption, resume) are not counted twice.

    ``num_cached_tokens`` of the prompt were in the KV cache when the engine that ended the request first began with it.
    For a resumable request they are those of its last segment, including former output; the other two count all
    segments. ``num_accepted_prediction_tokens`` of a prediction are in the output, and the rejected ones are not.
    """

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_accepted_prediction_tokens: int = 0
    num_rejected_prediction_tokens: int = 0


class TokenLogprobs(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """Log probability of an output token, its rank (1 is the most probable), and pairs of the most probable tokens and
    theirs, in descending order. The token is among ``top`` only if its rank is.

    ``texts`` are the bytes of the token, then of each of ``top``, which the worker process adds; none with
    ``detokenize=False``. A token may be a part of a character only.
    """

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
    texts: list[bytes] = []
