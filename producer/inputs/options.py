"""The options of a request besides its prompt and sampling parameters, its id, and their checks."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ...shared.errors import ValidationError
from ...shared.messages.requests import EXACT
from ...shared.params.lora import LoRARequest
from ...shared.values.checks import check_encodable, check_text
from ...shared.values.names import MAX_NAME_CHARS, check_name
from ...shared.values.shown import shown

MAX_CACHE_SALT_CHARS = 512
MAX_EXTERNAL_REQ_ID_CHARS = 256
MAX_SESSION_ID_CHARS = 512
MAX_LINGER_S = 86_400.0
# A caller with an idempotency key that has lost its connection needs this long to repeat its call, whatever
# ``reconnect_grace_s`` is.
REPEAT_LINGER_S = 5.0
MAX_TRACE_HEADERS_CHARS = 8192
READ_TTL_S = 60.0


# Between the id of a request and the number of an answer beyond its first.
SEPARATOR = "~"
_CHILD_ID = re.compile(rf".*{SEPARATOR}[1-9][0-9]*", re.DOTALL)


class SharedOptions(TypedDict, total=False):
    """Options of one request, or of several in one call, besides prompt and sampling parameters.

    ``model``: name of the model; may be left out if the client has a default or Redis knows only one.
    ``tenant``: the tenant to which the request belongs; the client's ``tenant`` when None.
    ``band``: its urgency, one of the queue's bands ("interactive", "standard", "batch" unless configured otherwise);
    the queue's default band when None.
    ``deadline``: Unix time in seconds, by the clock of Redis, at which it expires: after it the request is not started,
    or is stopped, and ends with finish_reason "expired" and the tokens so far.
    ``timeout_s``: the same, in seconds from now; the earlier of the two holds.
    ``priority``: lower is earlier, among the requests that the engine has admitted, if it schedules by priority.
    ``cache_salt``: only requests of the tenant with the same salt share blocks of the KV cache.
    ``fail_fast``: raise ``EngineDeadError`` rather than wait for an engine; the client's ``fail_fast`` when None.
    ``chat_template_kwargs``: passed to the chat template, for a prompt of messages.
    ``linger_s``: how long a streamed request continues after it was left early, so that another reader can follow it;
    after this time without a reader it is cancelled. By default, and with 0, it is cancelled immediately.
    ``read_ttl_s``: how long the answer of a streamed or awaited request can be read again after it was read to its end.
    By default a minute if ``request_id`` was left out, since no other reader knows the id; otherwise as long as any
    result (``result_ttl_s`` of the client).
    ``lora_request``: the adapter to apply: its name, or a ``LoRARequest``. The name is resolved now, and the request
    keeps that adapter. The name of an adapter as ``model`` has the same effect. Engines need ``--enable-lora``.
    ``LLM.generate`` and ``LLM.chat`` also accept one per prompt.
    ``webhook_url``: URL that is notified of the end, by a signed POST; only for detached requests (``submit``).
    ``webhook_events``: name of the event: "request" (``request.completed``) when None, or "response"
    (``response.completed``, as OpenAI's).
    ``trace_headers``: of the trace to which the request belongs (W3C: "traceparent", "tracestate"); its spans join that
    trace, and worker processes log the trace's id.
    ``external_req_id``: the caller's name for the request, such as the ``x-request-id`` of a web app; worker processes
    log it as ``x_request_id``. It need not be unique.
    ``session_id``: id of the conversation or document with which its prompt begins. Requests of a tenant with the same
    id go to the engine that had the last of them, if it has capacity, since its KV cache may hold the prefix.
    Conversations in messages are recognized without it; text and token ids need it.
    ``resume``: "exact" forbids engines that cannot resume with the same tokens after another engine's death. Penstock's
    engine can; other engines may draw the rest anew (guide, "vLLM").
    ``tokenization_kwargs``: overrides the model's tokenization of the prompt: ``add_special_tokens``,
    ``truncate_prompt_tokens`` (as in the parameters), or ``truncation`` and ``max_length`` as in transformers, and
    ``truncation_side`` ("left" keeps the last tokens).
    ``prediction``: text that the output is likely to equal or to contain in long pieces, such as a file to change. An
    engine with ``--speculative`` generates predicted tokens sooner; the output is the same.
    ``key_name``: name of the API key that it came with; its usage is counted and limited under this name.
    """

    model: str | None
    tenant: str | None
    band: str | None
    deadline: float | None
    timeout_s: float | None
    priority: int
    cache_salt: str | None
    fail_fast: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    linger_s: float | None
    read_ttl_s: float | None
    lora_request: LoRARequest | str | Sequence[LoRARequest | str | None] | None
    webhook_url: str | None
    webhook_events: str | None
    trace_headers: Mapping[str, str] | None
    external_req_id: str | None
    session_id: str | None
    resume: str | None
    prediction: str | None
    tokenization_kwargs: Mapping[str, Any] | None
    key_name: str | None


class RequestOptions(SharedOptions, total=False):
    """Options of one request: the shared ones, and ``request_id``, its idempotency key; random when left out."""

    request_id: str | None


def cache_salt_of(options: RequestOptions) -> str | None:
    """Return the ``cache_salt``. Raises ``ValidationError`` if it is not a string, empty or too long."""
    salt: Any = options.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= MAX_CACHE_SALT_CHARS):
        raise ValidationError(
            f"cache_salt must be a string of 1 to {MAX_CACHE_SALT_CHARS} characters, got {shown(salt)}"
        )
    return None if salt is None else check_text("cache_salt", salt)


def session_id_of(options: RequestOptions) -> str | None:
    """Return the ``session_id``. Raises ``ValidationError`` if it is not a string, empty or too long."""
    session_id: Any = options.get("session_id")
    is_id = isinstance(session_id, str) and 1 <= len(session_id) <= MAX_SESSION_ID_CHARS
    if session_id is not None and not is_id:
        raise ValidationError(
            f"session_id must be a string of 1 to {MAX_SESSION_ID_CHARS} characters, got {shown(session_id)}"
        )
    return None if session_id is None else check_text("session_id", session_id)


def key_name_of(options: RequestOptions) -> str:
    """Return the ``key_name``, "" by default. Raises ``ValidationError`` if it is not printable text, or too long."""
    name: Any = options.get("key_name")
    if name is not None and not (isinstance(name, str) and len(name) <= MAX_NAME_CHARS and name.isprintable()):
        raise ValidationError(
            f"key_name must be a string of at most {MAX_NAME_CHARS} printable characters, got {shown(name)}"
        )
    return name or ""


def resume_of(options: RequestOptions) -> str:
    """Return the ``resume``, "" by default. Raises ``ValidationError`` if it is anything else."""
    resume: Any = options.get("resume")
    if resume is not None and resume != EXACT:
        raise ValidationError(f"resume must be {EXACT!r}, or be left out, got {shown(resume)}")
    return resume or ""


def prediction_of(options: RequestOptions) -> str | None:
    """Return the ``prediction``, None if it is empty. Raises ``ValidationError`` if it is not text."""
    prediction: Any = options.get("prediction")
    if prediction is not None and not isinstance(prediction, str):
        raise ValidationError(f"prediction must be text, got {shown(prediction)}")
    return check_text("prediction", prediction) if prediction else None


def options_of_each(options: RequestOptions, num_prompts: int) -> list[RequestOptions]:
    """Return the options of each of several prompts, with one adapter each if a list of adapters is passed.

    Raises:
        ValidationError: the numbers of adapters and prompts differ.
    """
    adapters = options.get("lora_request")
    if not isinstance(adapters, list | tuple):
        return [options] * num_prompts
    if len(adapters) != num_prompts:
        num_adapters = len(adapters)
        raise ValidationError(f"lora_request must be one or as many as the prompts ({num_prompts}), got {num_adapters}")
    return [RequestOptions(**{**options, "lora_request": adapter}) for adapter in adapters]


def lora_request_of(options: RequestOptions) -> LoRARequest | None:
    """Return the resolved ``lora_request``. Raises ``ValidationError`` if it is anything else."""
    lora_request: Any = options.get("lora_request")
    if not isinstance(lora_request, LoRARequest | None):
        raise ValidationError(f"lora_request must be a LoRARequest or a name, got {shown(lora_request)}")
    return lora_request


def external_req_id_of(options: RequestOptions) -> str | None:
    """Return the ``external_req_id``. Raises ``ValidationError`` if it is not a printable string, or too long."""
    req_id: Any = options.get("external_req_id")
    is_id = isinstance(req_id, str) and 1 <= len(req_id) <= MAX_EXTERNAL_REQ_ID_CHARS and req_id.isprintable()
    if req_id is not None and not is_id:
        raise ValidationError(
            f"external_req_id must be a string of 1 to {MAX_EXTERNAL_REQ_ID_CHARS} printable characters, got "
            f"{repr(req_id)[:80]}"
        )
    return req_id


def trace_headers_of(options: RequestOptions) -> dict[str, str] | None:
    """Return the ``trace_headers``. Raises ``ValidationError`` if they are not strings, or too long."""
    headers: Any = options.get("trace_headers")
    if headers is None:
        return None
    if not isinstance(headers, Mapping) or not all(isinstance(part, str) for item in headers.items() for part in item):
        raise ValidationError(f"trace_headers must map strings to strings, got {shown(headers)}")
    num_chars = sum(len(name) + len(value) for name, value in headers.items())
    if num_chars > MAX_TRACE_HEADERS_CHARS:
        raise ValidationError(
            f"trace_headers must have at most {MAX_TRACE_HEADERS_CHARS} characters, got {num_chars}; pass traceparent "
            "and tracestate alone"
        )
    for name, value in headers.items():
        check_text("a name of trace_headers", name)
        check_text(f"trace_headers[{shown(name)}]", value)
    return dict(headers)


def template_kwargs_of(kwargs: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return ``chat_template_kwargs``, None if empty. Raises ``ValidationError`` if they are not plain data."""
    if not kwargs:
        return None
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ValidationError(f"chat_template_kwargs must be a dict with strings as keys, got {shown(kwargs)}")
    checked = dict(kwargs)
    check_encodable("chat_template_kwargs", checked)
    return checked


def expiry_time_of(options: RequestOptions) -> float | None:
    """Return the Unix time at which the request expires, by ``deadline`` and ``timeout_s``; None if it never does.

    Raises:
        ValidationError: one of them is not a finite positive number.
    """
    due: float | None = None
    for name, start in (("deadline", 0.0), ("timeout_s", time.time())):
        value: Any = options.get(name)
        if value is None:
            continue
        valid = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e11
        if not valid:
            raise ValidationError(f"{name} must be a positive number of seconds, got {shown(value)}")
        due = start + value if due is None else min(due, start + value)
    return due


def check_flag(field: str, value: object) -> bool:
    """Return ``value`` if it is True or False.

    Raises:
        ValidationError: it is anything else, including numbers and strings.
    """
    if not isinstance(value, bool):
        raise ValidationError(f"{field} must be True or False, got {shown(value)}")
    return value


def check_linger(linger_s: object) -> None:
    """Raise ``ValidationError`` unless ``linger_s`` is None or a number of seconds of at most a day."""
    if linger_s is None:
        return
    if isinstance(linger_s, bool) or not isinstance(linger_s, int | float) or not 0 <= linger_s <= MAX_LINGER_S:
        raise ValidationError(f"linger_s must be a number of seconds in [0, {MAX_LINGER_S:g}], got {shown(linger_s)}")


def read_ttl_of(option: object, *, request_id: str | None) -> float | None:
    """Return how long a result is stored after it was read, in seconds; None for as long as an unread result.

    Args:
        option: ``read_ttl_s`` of the request's options.
        request_id: the id that the caller chose; None if it chose none.

    Raises:
        ValidationError: the option is not a number of seconds.
    """
    if option is None:
        return READ_TTL_S if request_id is None else None
    if isinstance(option, bool) or not isinstance(option, int | float) or not 0 <= option < 1e9:
        raise ValidationError(f"read_ttl_s must be a number of seconds in [0, 1e9), got {shown(option)}")
    return float(option)


def is_child_id(request_id: str) -> bool:
    """Return whether this is the id of an answer beyond the first of some request."""
    return _CHILD_ID.fullmatch(request_id) is not None


def check_request_id(request_id: object) -> str:
    """Return ``request_id`` if a caller may choose it for a request.

    Raises:
        ValidationError: it cannot be part of a key, or is the id of a further answer of another request.
    """
    name = check_name("request_id", request_id)
    if is_child_id(name):
        raise ValidationError(
            f"request_id must not end in {SEPARATOR!r} and a number, by which further answers of a request are known, "
            f"got {shown(name)}"
        )
    return name
