"""What a request may say beside its prompt and sampling parameters, and what is wrong with it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ...shared.errors import ValidationError
from ...shared.messages.requests import EXACT
from ...shared.params.lora import LoRARequest
from ...shared.values.encodable import check_encodable, check_text
from ...shared.values.shown import shown

MAX_CACHE_SALT_CHARS = 512
MAX_EXTERNAL_REQ_ID_CHARS = 256
MAX_SESSION_ID_CHARS = 512
MAX_LINGER_S = 86_400.0
MAX_TRACE_HEADERS_CHARS = 8192
READ_TTL_S = 60.0


class SharedOptions(TypedDict, total=False):
    """What a request, or several at once, may say beside prompt and sampling parameters.

    ``model``: which model; may be left out while the client has a default or Redis knows only one.
    ``tenant``: on whose account it waits and runs; the client's ``tenant`` when None.
    ``band``: how urgent it is, one of the queue's bands ("interactive", "standard", "batch" unless configured
    otherwise); the queue's default band when None.
    ``deadline``: Unix time in seconds, by the clock of Redis, at which it expires: from then on it is not started, or
    is stopped, and ends with finish_reason "expired" and the tokens so far.
    ``timeout_s``: the same, in seconds from now; the earlier of the two holds.
    ``priority``: lower is earlier, within what the engine has admitted, if it schedules by priority.
    ``cache_salt``: only requests of the tenant with the same one share blocks of the KV cache.
    ``fail_fast``: raise ``EngineDeadError`` rather than wait for an engine; the client's ``fail_fast`` when None.
    ``chat_template_kwargs``: passed to the chat template, for a prompt of messages.
    ``linger_s``: how long a request that is streamed goes on after it was left early, for somebody to follow it; it is
    cancelled then, or when nobody follows any more. By default, and with 0, it is cancelled at once.
    ``read_ttl_s``: how long the answer of a request that is streamed or awaited can be read again once it was read to
    its end. By default a minute where ``request_id`` was left out, so that nobody else knows it, and as long as any
    result (``result_ttl_s`` of the client) where it was given.
    ``lora_request``: the adapter to apply: its name, or a ``LoRARequest``. What it is now, the request ends with. The
    name of an adapter as ``model`` says the same. Engines need ``--enable-lora``. ``LLM.generate`` and ``LLM.chat``
    take one for each prompt, too.
    ``webhook_url``: who is told of the end, by a signed POST; of detached requests (``submit``) alone.
    ``webhook_events``: how the event is called: "request" (``request.completed``) when None, or "response"
    (``response.completed``, as OpenAI's).
    ``trace_headers``: of the trace that it belongs to (W3C: "traceparent", "tracestate"); its spans are made there, and
    worker processes log the trace's id.
    ``external_req_id``: what whoever asks calls it, such as the ``x-request-id`` of a web app's own request; worker
    processes log it as ``x_request_id``. It need not be unique.
    ``session_id``: what it goes on with, such as the conversation or document that its prompt begins with. Requests of
    a tenant with the same one go to the engine that had the last of them, if that has room, since its KV cache may hold
    the beginning. Conversations in messages are known by themselves; text and token ids need it.
    ``resume``: "exact" has the request refused by an engine that could not go on with its very tokens after another
    one's death. Penstock's engine can; another may draw the rest anew (guide, "vLLM").
    ``tokenization_kwargs``: how its prompt becomes tokens, where it is not as the model asks: ``add_special_tokens``,
    ``truncate_prompt_tokens`` (as in the parameters), or ``truncation`` and ``max_length`` as transformers has them,
    and ``truncation_side`` ("left" keeps the last tokens).
    ``prediction``: text that its output is likely to be, or to hold in long pieces, such as a file that it is asked to
    change. An engine with ``--speculative`` gives tokens that were predicted sooner; the output is the same.
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


class RequestOptions(SharedOptions, total=False):
    """The same, of one request, and ``request_id``: its idempotency key, drawn at random when left out."""

    request_id: str | None


def cache_salt_of(options: RequestOptions) -> str | None:
    """Return the ``cache_salt``. Raises ``ValidationError`` if it is no string, empty or too long."""
    salt: Any = options.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= MAX_CACHE_SALT_CHARS):
        raise ValidationError(
            f"cache_salt must be a string of 1 to {MAX_CACHE_SALT_CHARS} characters, got {shown(salt)}"
        )
    return None if salt is None else check_text("cache_salt", salt)


def session_id_of(options: RequestOptions) -> str | None:
    """Return the ``session_id``. Raises ``ValidationError`` if it is no string, empty or too long."""
    session_id: Any = options.get("session_id")
    is_id = isinstance(session_id, str) and 1 <= len(session_id) <= MAX_SESSION_ID_CHARS
    if session_id is not None and not is_id:
        raise ValidationError(
            f"session_id must be a string of 1 to {MAX_SESSION_ID_CHARS} characters, got {shown(session_id)}"
        )
    return None if session_id is None else check_text("session_id", session_id)


def resume_of(options: RequestOptions) -> str:
    """Return the ``resume``, "" where nothing is demanded. Raises ``ValidationError`` if it is anything else."""
    resume: Any = options.get("resume")
    if resume is not None and resume != EXACT:
        raise ValidationError(f"resume must be {EXACT!r}, or be left out, got {shown(resume)}")
    return resume or ""


def prediction_of(options: RequestOptions) -> str | None:
    """Return the ``prediction``, None if it is empty. Raises ``ValidationError`` if it is no text."""
    prediction: Any = options.get("prediction")
    if prediction is not None and not isinstance(prediction, str):
        raise ValidationError(f"prediction must be text, got {shown(prediction)}")
    return check_text("prediction", prediction) if prediction else None


def options_of_each(options: RequestOptions, num_prompts: int) -> list[RequestOptions]:
    """Return the options of each of several prompts: where they have several adapters, one each.

    Raises:
        ValidationError: there are not as many adapters as prompts.
    """
    given = options.get("lora_request")
    if not isinstance(given, list | tuple):
        return [options] * num_prompts
    if len(given) != num_prompts:
        raise ValidationError(f"lora_request must be one or as many as the prompts ({num_prompts}), got {len(given)}")
    return [RequestOptions(**{**options, "lora_request": one}) for one in given]


def lora_request_of(options: RequestOptions) -> LoRARequest | None:
    """Return the ``lora_request``, which has been resolved. Raises ``ValidationError`` if it is anything else."""
    lora_request: Any = options.get("lora_request")
    if not isinstance(lora_request, LoRARequest | None):
        raise ValidationError(f"lora_request must be a LoRARequest or a name, got {shown(lora_request)}")
    return lora_request


def external_req_id_of(options: RequestOptions) -> str | None:
    """Return the ``external_req_id``. Raises ``ValidationError`` if it is no printable string, or too long."""
    given: Any = options.get("external_req_id")
    is_id = isinstance(given, str) and 1 <= len(given) <= MAX_EXTERNAL_REQ_ID_CHARS and given.isprintable()
    if given is not None and not is_id:
        raise ValidationError(
            f"external_req_id must be a string of 1 to {MAX_EXTERNAL_REQ_ID_CHARS} printable characters, got "
            f"{repr(given)[:80]}"
        )
    return given


def trace_headers_of(options: RequestOptions) -> dict[str, str] | None:
    """Return the ``trace_headers``. Raises ``ValidationError`` if they are no strings, or too long."""
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
    """Return ``chat_template_kwargs``, None if there are none. Raises ``ValidationError`` if they are no plain data."""
    if not kwargs:
        return None
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ValidationError(f"chat_template_kwargs must be a dict with strings as keys, got {shown(kwargs)}")
    checked = dict(kwargs)
    check_encodable("chat_template_kwargs", checked)
    return checked


def wanted_until(options: RequestOptions) -> float | None:
    """Return the Unix time at which the request expires, by ``deadline`` and ``timeout_s``; None if it never does.

    Raises:
        ValidationError: one of them is no finite positive number.
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
        ValidationError: it is anything else, a number or a string included.
    """
    if not isinstance(value, bool):
        raise ValidationError(f"{field} must be True or False, got {shown(value)}")
    return value


def check_linger(linger_s: object) -> None:
    """Raises ``ValidationError`` unless ``linger_s`` is None or a number of seconds of at most a day."""
    if linger_s is None:
        return
    if isinstance(linger_s, bool) or not isinstance(linger_s, int | float) or not 0 <= linger_s <= MAX_LINGER_S:
        raise ValidationError(f"linger_s must be a number of seconds in [0, {MAX_LINGER_S:g}], got {shown(linger_s)}")


def read_ttl_of(option: object, *, request_id: str | None) -> float | None:
    """Return how long a result is kept after it was read, in seconds; None: as long as if it had not been.

    Args:
        option: ``read_ttl_s`` of the request's options.
        request_id: the id that its caller chose, if one did.

    Raises:
        ValidationError: the option is no number of seconds.
    """
    if option is None:
        return READ_TTL_S if request_id is None else None
    if isinstance(option, bool) or not isinstance(option, int | float) or not 0 <= option < 1e9:
        raise ValidationError(f"read_ttl_s must be a number of seconds in [0, 1e9), got {shown(option)}")
    return float(option)
