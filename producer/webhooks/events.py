"""Records of webhooks in Redis, and the event of an outbox entry that the broker wrote at the end of a request.

Records are JSON, so that people can read them. The rules of messages apply: new fields are appended and have a default,
and old bytes still decode (tests/compat).
Types of OpenAI's Responses: https://platform.openai.com/docs/guides/webhooks.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from ...shared.errors import ValidationError
from ...shared.messages import WIRE_VERSION
from ...shared.messages.deltas import Delta
from ...shared.messages.outcome import FinishReason
from ...shared.queue.lifecycle import RequestState
from ...shared.values.shown import MaskedRepr

_delta_decoder = msgspec.msgpack.Decoder(Delta)
_STATE, _RECORD = b"state:", b"record:"
# State of an answer -> name of the request's event. With several answers, the first state in this order applies.
_OUTCOMES = {
    RequestState.FAILED: "failed",
    RequestState.PARKED: "parked",
    RequestState.EXPIRED: "expired",
    RequestState.CANCELLED: "cancelled",
    RequestState.FINISHED: "completed",
}
# OpenAI has no parked and no expired responses. A parked one counts as failed; an expired one keeps its partial output.
_RESPONSE_OUTCOMES = {"parked": "failed", "expired": "incomplete"}


class EventFamily(enum.StrEnum):
    """Naming of the events of a request: Penstock's, or that of OpenAI's Responses."""

    REQUEST = "request"
    RESPONSE = "response"


class WebhookTarget(MaskedRepr, msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """The receiver of a request's event; stored with the request."""

    version: int = WIRE_VERSION
    url: str
    tenant: str = "default"
    model: str = ""
    family: EventFamily = EventFamily.REQUEST


class WebhookSecret(MaskedRepr, msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """A secret that signs the events of a tenant, to one URL or to all URLs without a separate secret.

    ``previous`` also signs until ``previous_until`` (Unix time), so that receivers can switch.
    """

    _secret_fields: ClassVar[frozenset[str]] = frozenset({"current", "previous"})

    version: int = WIRE_VERSION
    tenant: str
    url: str = ""
    current: str
    created_at: float
    previous: str = ""
    previous_until: float = 0.0


class EventState(enum.StrEnum):
    """State of an event. ``DEAD`` is the dead letter: it is not tried again until it is replayed."""

    PENDING = "pending"
    DELIVERED = "delivered"
    DEAD = "dead"


class WebhookAttempt(msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """A POST. ``status`` is 0 without a response. ``error`` is the reason of a failure, empty after success."""

    at: float
    duration_s: float = 0.0
    status: int = 0
    error: str = ""


class WebhookEvent(MaskedRepr, msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """An event and the state of its delivery. ``body`` is sent unchanged at every attempt.

    ``num_attempts`` counts since the event was created or replayed. ``attempts`` has the last attempts of all.
    """

    version: int = WIRE_VERSION
    event_id: str
    type: str
    url: str
    tenant: str
    created_at: float
    body: str
    state: EventState = EventState.PENDING
    num_attempts: int = 0
    next_attempt_at: float = 0.0
    attempts: list[WebhookAttempt] = []


def new_event(event_id: str, event_type: str, url: str, tenant: str, created_at: float, data: Any) -> WebhookEvent:
    """Return an event whose body has ``data``, in the form of OpenAI's events."""
    body = {"object": "event", "id": event_id, "type": event_type, "created_at": int(created_at), "data": data}
    return WebhookEvent(
        event_id=event_id,
        type=event_type,
        url=url,
        tenant=tenant,
        created_at=created_at,
        body=msgspec.json.encode(body).decode(),
    )


def derived_event_id(identity: str) -> str:
    """Return the same id each time for the same identity, so that repeated attempts create one event."""
    return f"evt_{hashlib.sha256(identity.encode()).hexdigest()[:40]}"


_target_decoder = msgspec.json.Decoder(WebhookTarget)


class Answer(msgspec.Struct):
    """The end of one answer to a request."""

    request_id: str
    state: RequestState
    delta: Delta


def event_of(fields: Mapping[bytes, bytes]) -> WebhookEvent:
    """Return the event of an outbox entry.

    Raises:
        KeyError, ValueError, msgspec.MsgspecError: the entry is malformed.
    """
    target = _target_decoder.decode(fields[b"target"])
    event_id, ended_at = fields[b"event"].decode(), int(fields[b"ended_at"]) / 1000
    if b"type" in fields:
        event_type, data = fields[b"type"].decode(), msgspec.json.decode(fields[b"data"])
    else:
        answers = _answers(fields)
        event_type, data = _type_of(answers, target.family), _data_of(fields[b"request"].decode(), answers, target)
    return new_event(event_id, event_type, target.url, target.tenant, ended_at, data)


def _answers(fields: Mapping[bytes, bytes]) -> list[Answer]:
    """Return the answers in order: the first has the request's id, the others the id with a number appended."""
    ids = sorted((name.removeprefix(_STATE) for name in fields if name.startswith(_STATE)), key=lambda i: (len(i), i))
    if not ids:
        raise ValidationError("the entry has no answer")
    return [
        Answer(
            request_id=answer.decode(),
            state=msgspec.convert(fields[_STATE + answer].decode(), RequestState),
            delta=_delta_decoder.decode(fields[_RECORD + answer]),
        )
        for answer in ids
    ]


def _type_of(answers: list[Answer], family: EventFamily) -> str:
    states = [answer.state for answer in answers]
    outcome = next(name for state, name in _OUTCOMES.items() if state in states)
    if family is EventFamily.REQUEST:
        return f"{family}.{outcome}"
    if outcome == "completed" and any(answer.delta.finish_reason is FinishReason.LENGTH for answer in answers):
        outcome = "incomplete"
    return f"{family}.{_RESPONSE_OUTCOMES.get(outcome, outcome)}"


def _data_of(request_id: str, answers: list[Answer], target: WebhookTarget) -> dict[str, Any]:
    """Return the data that a receiver needs to fetch the answer. The text itself is not sent."""
    if target.family is EventFamily.RESPONSE:
        return {"id": request_id}
    usages = [answer.delta.usage for answer in answers if answer.delta.usage is not None]
    return {
        "id": request_id,
        "model": target.model,
        "tenant": target.tenant,
        "answers": [_plain(answer) for answer in answers],
        "usage": {
            "prompt_tokens": max((usage.num_prompt_tokens for usage in usages), default=0),
            "completion_tokens": sum(usage.num_output_tokens for usage in usages),
        },
    }


def _plain(answer: Answer) -> dict[str, Any]:
    error = answer.delta.error
    return {
        "id": answer.request_id,
        "status": _OUTCOMES[answer.state],
        "finish_reason": answer.delta.finish_reason,
        "error": None if error is None else {"code": error.code, "message": error.message},
    }
