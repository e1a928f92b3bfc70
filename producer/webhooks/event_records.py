"""What of webhooks is kept in Redis, as JSON, so that people can read it.

Same rules as for messages: new fields are only appended and carry a default, old bytes still decode (tests/compat).
"""

from __future__ import annotations

import enum
from typing import ClassVar

import msgspec

from ...shared.messages import WIRE_VERSION
from ...shared.urls import MaskedRepr


class EventFamily(enum.StrEnum):
    """Which names the events of a request have: ours, or those of OpenAI's Responses."""

    REQUEST = "request"
    RESPONSE = "response"


class WebhookTarget(MaskedRepr, msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """Who is told of an end; goes with the request."""

    version: int = WIRE_VERSION
    url: str
    tenant: str = "default"
    model: str = ""
    family: EventFamily = EventFamily.REQUEST


class WebhookSecret(MaskedRepr, msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """What signs the events of a tenant, to one URL or to all that have none of their own.

    ``previous`` signs beside ``current`` until ``previous_until`` (Unix time), so that receivers may change over.
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
    """Where an event stands. ``DEAD`` is the dead letter: nobody tries any more, until it is replayed."""

    PENDING = "pending"
    DELIVERED = "delivered"
    DEAD = "dead"


class WebhookAttempt(msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """One POST. ``status`` is 0 where no answer came; ``error`` says why it counts as failed, empty if it does not."""

    at: float
    duration_s: float = 0.0
    status: int = 0
    error: str = ""


class WebhookEvent(MaskedRepr, msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """An event and what became of it. ``body`` is what is sent, the same at every attempt.

    ``num_attempts`` counts since the event was made, or replayed; ``attempts`` are the last ones of all.
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
