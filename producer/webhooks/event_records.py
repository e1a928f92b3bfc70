"""Records of webhooks in Redis, as JSON, so that people can read them.

The rules of messages apply: new fields are appended and have a default, and old bytes still decode (tests/compat).
"""

from __future__ import annotations

import enum
from typing import ClassVar

import msgspec

from ...shared.messages import WIRE_VERSION
from ...shared.urls import MaskedRepr


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
