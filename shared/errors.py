"""Every error that Penstock raises on purpose."""

from __future__ import annotations

from typing import Any

MAX_MESSAGE_CHARS = 800
_GAP = " … "


def cut(text: str, max_chars: int = MAX_MESSAGE_CHARS) -> str:
    """Return ``text`` with at most ``max_chars``: the middle is left out, since field and remedy stand at the ends.

    Characters that UTF-8 cannot encode are written as escapes, so that every message can be sent and logged.
    """
    if len(text) > max_chars:
        num_last = (max_chars - len(_GAP)) // 3
        text = text[: max_chars - len(_GAP) - num_last] + _GAP + text[-num_last:]
    if text.isascii():
        return text
    return text.encode(errors="backslashreplace").decode()


class PenstockError(Exception):
    """Base class; catch it to catch everything Penstock raises on purpose."""

    code: str = "penstock_error"
    retryable: bool = False


class ConfigurationError(PenstockError):
    """A setting of the deployment is wrong; the message names it and the remedy."""

    code = "configuration_error"


class CacheTooSmallError(ConfigurationError):
    """The KV cache may not take the memory that a single request needs; the message names both and the remedy."""

    code = "cache_too_small"


class DeviceMemoryError(ConfigurationError):
    """The device has less free memory than the model needs now; the message names what needed it."""

    code = "device_memory"


class RedisUnavailableError(ConfigurationError):
    """No Redis answers at the URL, or it refuses the connection."""

    code = "redis_unavailable"
    retryable = True


class RedisUnsupportedError(ConfigurationError):
    """The Redis at the URL is older than 6.2 or lacks a command that Penstock needs."""

    code = "redis_unsupported"


class ModelLoadError(ConfigurationError):
    """The model folder or hub name cannot be loaded; the message names the file or field."""

    code = "model_load_error"


class ValidationError(PenstockError, ValueError):
    """An argument is wrong: the message names the field, its value and the allowed values.

    The message stays short, however long the value or a library's message is.
    """

    code = "validation_error"

    def __init__(self, message: str) -> None:
        super().__init__(cut(message))


class PromptTooLongError(ValidationError):
    """The prompt leaves no room for an output token within ``max_model_len``."""

    code = "prompt_too_long"


class PayloadTooLargeError(ValidationError):
    """The encoded request exceeds ``max_payload_bytes``."""

    code = "payload_too_large"


class UnsupportedParameterError(ValidationError):
    """The parameter is part of the wire, but this version cannot honour it; it is refused, not ignored."""

    code = "unsupported_parameter"


class UnsupportedTaskError(ValidationError):
    """The model, or this version, does not do that with a prompt; the message names what it does."""

    code = "unsupported_task"


class UnknownArgumentError(ValidationError, TypeError):
    """A function or a class has no argument of that name; the message names the nearest one."""

    code = "unknown_argument"


class AdapterFileError(ValidationError):
    """The folder of an adapter lacks a file, or holds another adapter than it is known to.

    Another engine may see the folder as it should be: a request that ends with this may be sent again.
    """

    code = "adapter_file"
    retryable = True


class UnsupportedAdapterError(ValidationError):
    """The adapter is of a kind that no engine here computes; the message names the unsupported part."""

    code = "unsupported_adapter"


class RequestConflictError(PenstockError):
    """The ``request_id`` is that of another request; nothing was enqueued.

    ``field`` is the field that differs: "tenant", "prompt", "params" or "lora_request".
    """

    code = "request_conflict"

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class UnknownModelError(PenstockError):
    """No worker has ever served a model of that name on this Redis."""

    code = "unknown_model"


class UnknownAdapterError(PenstockError):
    """No adapter of that name or number is registered for the model, or it is another tenant's."""

    code = "unknown_adapter"


class RequestNotFoundError(PenstockError):
    """The request_id was never enqueued here, or its result has expired."""

    code = "request_not_found"


class RequestLostError(RequestNotFoundError):
    """The request was under way, and Redis does not know it any more: its data were deleted, or lost in a restart."""

    code = "request_lost"
    retryable = True


class OutputChangedError(PenstockError):
    """Tokens that the reader has came again, and are others: the output that it has goes on nowhere.

    Redis lost a part of the log, another engine generated it anew, and did not get the same: possible where it computes
    otherwise, or in other company, unless both are ``--deterministic``. Send the request again for a whole output.
    """

    code = "output_changed"
    retryable = True


class UnknownFileError(PenstockError):
    """The tenant has no file of that id: it was never made, was deleted, or has expired."""

    code = "unknown_file"


class UnknownBatchError(PenstockError):
    """The tenant has no batch of that id."""

    code = "unknown_batch"


class BatchEndedError(PenstockError):
    """The batch has ended, so there is nothing to cancel."""

    code = "batch_ended"


class BatchHeldError(PenstockError):
    """Another runner holds the lease of the batch."""

    code = "batch_held"
    retryable = True


class BatchTakenOverError(BatchHeldError):
    """The lease of this runner had expired, and another runner has the batch; finished rows are retained."""

    code = "batch_taken_over"


class InputClosedError(PenstockError):
    """A resumable request takes no more chunks: it has ended, or its input was closed."""

    code = "input_closed"


class ClientClosedError(PenstockError):
    """The client was used after ``close()``, or elsewhere than in the process and event loop that opened it."""

    code = "client_closed"


class ServerShutdownError(PenstockError):
    """The web server shuts down, so an open event stream ends; another process resumes it."""

    code = "server_shutdown"
    retryable = True


class RefusedForNowError(PenstockError):
    """Nothing was enqueued; the same call may succeed after ``retry_after_s``."""

    retryable = True

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RedisFullError(RefusedForNowError):
    """Redis has reached its ``maxmemory``. Running requests wait until it has memory again, without loss."""

    code = "redis_full"


class QueueFullError(RefusedForNowError):
    """The number of waiting requests or tokens has reached the limit of the model's or the tenant's policy.

    ``retry_after_s`` is reckoned from the measured service rate.
    """

    code = "queue_full"


class QuotaExceededError(RefusedForNowError):
    """The tenant is over a quota, and its policy says to refuse rather than to wait."""

    code = "quota_exceeded"


class InsufficientQuotaError(RefusedForNowError):
    """A budget of the tenant or of its API key is used up until ``retry_after_s`` from now."""

    code = "insufficient_quota"


class BrokerError(PenstockError):
    """Redis answered in a way the protocol does not allow."""

    code = "broker_error"


class RequestFailedError(PenstockError):
    """The engine refused or failed this request; other requests are not touched."""

    code = "request_failed"

    def __init__(self, message: str, *, code: str | None = None, retryable: bool = False) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
        self.retryable = retryable


class BudgetSpentError(RequestFailedError):
    """A budget of its tenant or API key was used up while the request waited to be started."""

    code = "insufficient_quota"


class PoisonRequestError(RequestFailedError):
    """``max_deliveries`` engines died on this request in a row; it is parked in the dead letter."""

    code = "poison_request"


class DamagedRecordError(RequestFailedError):
    """Something other than Penstock has written to the request's record in Redis, or deleted it; it is parked."""

    code = "damaged_record"


class ModelBrokenError(PenstockError):
    """The model cannot be loaded on any device; the message names the cause. Requests for it end with this."""

    code = "model_broken"


class ModelTooLargeError(ModelBrokenError):
    """The model does not fit on any device, even alone; the message has the sizes and the remedy."""

    code = "model_too_large"


class EngineDeadError(PenstockError):
    """The engine core is gone, or no live engine serves the model; the message names the cause.

    ``retry_after_s`` is the time until an engine starts again; None if that is unknown.
    """

    code = "engine_dead"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineNotFoundError(PenstockError):
    """No engine of that id has a heartbeat for the model; the message names those that have."""

    code = "engine_not_found"


class EngineStateError(PenstockError):
    """The state of the engine does not allow the call; the message names the remedy."""

    code = "engine_state"


class UnsupportedCallError(PenstockError):
    """The engine lacks the part for this call; the message names the part."""

    code = "unsupported_call"


class DrainTimeoutError(PenstockError, TimeoutError):
    """Requests were still under way when the time for them to end was up; nothing was done to them."""

    code = "drain_timeout"
    retryable = True


class EngineTimeoutError(PenstockError):
    """The engine did not answer in time. It is unknown whether it carries out the call."""

    code = "engine_timeout"
    retryable = True


class EngineCallError(PenstockError):
    """A control call failed at one engine at least.

    Attributes:
        answers: by engine id, of the engines that succeeded.
        errors: by engine id, why each of the others did not.
    """

    code = "engine_call_failed"

    def __init__(
        self, message: str, *, answers: dict[str, Any] | None = None, errors: dict[str, PenstockError] | None = None
    ) -> None:
        super().__init__(message)
        self.answers = answers or {}
        self.errors = errors or {}


_BY_CODE: dict[str, type[PenstockError]] = {
    cls.code: cls
    for cls in (
        ValidationError,
        PromptTooLongError,
        UnsupportedParameterError,
        UnsupportedTaskError,
        PoisonRequestError,
        BudgetSpentError,
        DamagedRecordError,
        EngineDeadError,
        EngineStateError,
        UnsupportedCallError,
        EngineTimeoutError,
        EngineCallError,
        ModelLoadError,
        ModelBrokenError,
        ModelTooLargeError,
    )
}


def from_wire(code: str, message: str, retryable: bool) -> PenstockError:
    """Return the exception that a ``RequestError`` or ``CallError`` on the wire stands for."""
    cls = _BY_CODE.get(code)
    if cls is not None:
        return cls(message)
    return RequestFailedError(message, code=code, retryable=retryable)


class GroupBrokenError(EngineDeadError):
    """The ranks of a group no longer compute together: one has exited, hangs, or is in another step."""

    code = "group_broken"


class GroupSizeError(EngineStateError):
    """The group cannot have this number of ranks."""

    code = "group_size"
