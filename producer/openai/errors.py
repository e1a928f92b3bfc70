"""Errors in the form of OpenAI's API, and their mapping from Penstock's exceptions.

    400 a field is invalid      401 API key missing or invalid  404 unknown model, request or route
    408 expired                 409 not allowed in this state   413 body too large
    429 queue full, over quota  499 the request was cancelled   500 the engine failed     503 no engine serves

408, 429 and 503 carry ``Retry-After``. The ``openai`` package has a separate exception class for most of them.
"""

from __future__ import annotations

import math
import re

import msgspec

from ...shared import errors
from ...shared.errors import UnknownAdapterError, cut
from ...shared.values.shown import MAX_SHOWN_CHARS

# The openai package retries 408, 409, 429 and 5xx by default, so a cancelled request has another status.
CLIENT_CLOSED_REQUEST = 499
# Statuses of refusals that may be temporary, and when to try again if nothing is known.
RETRYABLE, RETRY_AFTER_S = (408, 429, 503), 1.0

EXPIRED = "request_expired"

# Our messages begin with the field's name. Messages of msgspec end with its path.
_LEADING_FIELD = re.compile(r"^([a-z_][a-z0-9_]*(?:\[[^\]]*\])*(?:\.[a-z_][a-z0-9_]*(?:\[[^\]]*\])*)*)(?=[ :=])")
_NO_FIELDS = frozenset({"a", "an", "the", "there", "this"})
_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]+)`(?: - at `\$\.?([^`]*)`)?")
_MISSING_FIELD = re.compile(r"missing required field `([^`]+)`(?: - at `\$\.?([^`]*)`)?")
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")


class ErrorDetail(msgspec.Struct):
    """An error: ``param`` is the invalid field, ``code`` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of every error response."""

    error: ErrorDetail


class OpenAIError(errors.PenstockError):
    """An error response.

    Args:
        status: HTTP status.
        type, param, code: fields of OpenAI's error body.
        retry_after_s: when the same request may succeed; rounded up for the header. ``RETRY_AFTER_S`` for a status in
            ``RETRYABLE`` if None.
    """

    code = "openai_error"

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.message = cut(message)
        super().__init__(self.message)
        self.status = status
        self.type = type
        self.param = None if param is None else cut(param, MAX_SHOWN_CHARS)
        self.error_code = code
        self.retry_after_s = RETRY_AFTER_S if retry_after_s is None and status in RETRYABLE else retry_after_s

    @property
    def body(self) -> ErrorBody:
        return ErrorBody(ErrorDetail(self.message, self.type, self.param, self.error_code))

    def renamed(self, param: str) -> OpenAIError:
        """Return the same error about the field ``param``, which has another name there."""
        message = self.message if self.param is None else self.message.replace(self.param, param)
        return OpenAIError(
            self.status,
            message,
            type=self.type,
            param=param,
            code=self.error_code,
            retry_after_s=self.retry_after_s,
        )

    @property
    def headers(self) -> dict[str, str]:
        """The headers that accompany the body."""
        if self.retry_after_s is not None:
            return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def bad_field(param: str, message: str, *, code: str | None = None) -> OpenAIError:
    """Return a 400 about one field; ``message`` names it."""
    return OpenAIError(400, message, param=param, code=code)


# The client's name for the field ``vllm_xargs`` of bodies.
_CLIENT_NAME = re.compile(r"^extra_args\b")


def error_of(error: BaseException) -> OpenAIError:
    """Return ``error`` as an HTTP caller sees it. For an unexpected error that is only its occurrence."""
    if isinstance(error, OpenAIError):
        return error
    if isinstance(error, msgspec.MsgspecError | UnicodeDecodeError):
        return _unreadable(error)
    if isinstance(error, RecursionError):
        return OpenAIError(400, "the body is nested too deeply; nest its lists and objects less")
    for kind, status, type_, code in _STATUS_OF:
        if isinstance(error, kind):
            message = _CLIENT_NAME.sub("vllm_xargs", str(error))
            return OpenAIError(
                status,
                message,
                type=type_,
                param=_field_of(message) if status in (400, 413) else "model" if code == "model_not_found" else None,
                code=code,
                retry_after_s=getattr(error, "retry_after_s", None),
            )
    return OpenAIError(500, "the server failed; see its log", type="server_error", code="internal_error")


def cancelled() -> OpenAIError:
    """Return the error of a cancelled request: its caller disconnected, or cancelled it elsewhere."""
    return OpenAIError(CLIENT_CLOSED_REQUEST, "the request was cancelled", type="cancelled", code="request_cancelled")


def expired() -> OpenAIError:
    """Return the error of a request whose ``timeout_s`` passed before it had any output."""
    return OpenAIError(408, "the request expired before it was started", type="timeout", code=EXPIRED)


def _unreadable(error: msgspec.MsgspecError | UnicodeDecodeError) -> OpenAIError:
    """Return the error of a body that is not JSON, or does not have the required form."""
    message = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return OpenAIError(400, f"the body must be JSON: {message}", code="invalid_json")
    unknown, missing = _UNKNOWN_FIELD.search(message), _MISSING_FIELD.search(message)
    if unknown is not None:
        param = _field_path(unknown)
        return bad_field(param, f"{param} is not supported; leave it out", code="unknown_parameter")
    if missing is not None:
        param = _field_path(missing)
        return bad_field(param, f"{param} must be given", code="missing_required_parameter")
    path = _PATH.search(message)
    if path is None:
        return OpenAIError(400, message, param=_field_of(message))
    param = path[1]
    reason = message[: path.start()]
    return bad_field(param, f"{param}: {reason[:1].lower()}{reason[1:]}" if param else reason)


def _field_path(match: re.Match[str]) -> str:
    return f"{match[2]}.{match[1]}" if match[2] else match[1]


def _field_of(message: str) -> str | None:
    match = _LEADING_FIELD.match(message)
    return match[1] if match and match[1] not in _NO_FIELDS else None


# The first matching entry applies.
_STATUS_OF: tuple[tuple[type[BaseException], int, str, str | None], ...] = (
    (errors.PromptTooLongError, 400, "invalid_request_error", "context_length_exceeded"),
    (errors.PayloadTooLargeError, 413, "invalid_request_error", "payload_too_large"),
    (errors.UnsupportedParameterError, 400, "invalid_request_error", "unsupported_parameter"),
    (errors.UnsupportedTaskError, 400, "invalid_request_error", "unsupported_task"),
    (errors.ValidationError, 400, "invalid_request_error", None),
    (errors.UnknownModelError, 404, "invalid_request_error", "model_not_found"),
    (UnknownAdapterError, 404, "invalid_request_error", "adapter_not_found"),
    (errors.RequestLostError, 503, "server_error", "request_lost"),
    (errors.OutputChangedError, 503, "server_error", "output_changed"),
    (errors.RequestNotFoundError, 404, "invalid_request_error", "request_not_found"),
    (errors.UnknownFileError, 404, "invalid_request_error", "file_not_found"),
    (errors.UnknownBatchError, 404, "invalid_request_error", "batch_not_found"),
    (errors.RequestConflictError, 409, "invalid_request_error", "request_conflict"),
    (errors.BatchEndedError, 409, "invalid_request_error", "batch_ended"),
    (errors.InputClosedError, 409, "invalid_request_error", "input_closed"),
    (errors.QueueFullError, 429, "requests", "queue_full"),
    (errors.QuotaExceededError, 429, "requests", "rate_limit_exceeded"),
    (errors.InsufficientQuotaError, 429, "insufficient_quota", "insufficient_quota"),
    (errors.BudgetSpentError, 429, "insufficient_quota", "insufficient_quota"),
    (errors.RedisFullError, 503, "server_error", "redis_full"),
    (errors.RedisUnavailableError, 503, "server_error", "queue_unavailable"),
    (errors.ClientClosedError, 503, "server_error", "shutting_down"),
    (errors.ModelTooLargeError, 503, "server_error", "model_too_large"),
    (errors.ModelBrokenError, 503, "server_error", "model_broken"),
    (errors.EngineDeadError, 503, "server_error", "engine_dead"),
    (errors.EngineTimeoutError, 503, "server_error", "engine_timeout"),
    (errors.EngineStateError, 409, "invalid_request_error", "engine_state"),
    (errors.EngineNotFoundError, 404, "invalid_request_error", "engine_not_found"),
    (errors.PoisonRequestError, 500, "server_error", "poison_request"),
    (errors.RequestFailedError, 500, "server_error", "request_failed"),
    (errors.PenstockError, 500, "server_error", "server_error"),
)
