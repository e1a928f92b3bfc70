"""Deliver an event by attempts.

    2xx: delivered. 410: the receiver wants no more events. Forbidden address: not tried again.
    Anything else, including a redirect: retried with a growing delay, up to ``max_attempts``; then the dead letter.

An attempt is recorded after it was made. If the process dies in between, the receiver gets the event again with the
same id: delivery is at least once, and the id identifies duplicates.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from urllib.parse import urlsplit

import httpx
import msgspec
from standardwebhooks import Webhook

from ...shared.connection import CommandConnection
from ...shared.keys import Keys
from ...shared.process.log import get_logger
from ...shared.values.shown import mask_url
from ..background.concurrency import TenantSlots
from .event_store import EventStore
from .events import EventState, WebhookAttempt, WebhookEvent, WebhookSecret
from .guarded_http import ForbiddenAddressError, GuardedHTTP
from .secrets import SecretStore, no_secret
from .settings import WebhookSettings

__all__ = ["ForbiddenAddressError", "Reply", "Sender"]

MAX_EXCERPT_CHARS = 200

MAX_ATTEMPTS_SHOWN = 20
# A slow receiver must not use all places of its tenant, nor a tenant those of all others.
MAX_PER_HOST = 16
MAX_PER_TENANT = 24
PAUSE_WHILE_BUSY_S = 1.0
# Events without a free place are rescheduled at this rate per tenant. If they all were due at the same time, the
# backlog of one tenant would precede all events of others.
DEFERRED_PER_S = 200.0
JITTER = 0.1
log = get_logger(__name__)


class Reply(msgspec.Struct, frozen=True):
    """A response. ``excerpt`` is the start of its body, for people."""

    status: int
    excerpt: str


class Sender:
    """Posts events, any number concurrently."""

    def __init__(self, settings: WebhookSettings) -> None:
        self._settings = settings
        self._http = GuardedHTTP(
            settings.networks,
            connect_timeout_s=settings.timeout_s / 3,
            remedy="start 'penstock jobs' with --allow-private-webhooks and its network, then replay the event",
        )

    async def close(self) -> None:
        await self._http.close()

    async def post(self, url: str, headers: Mapping[str, str], body: str, *, tenant: str) -> Reply:
        """Send ``body`` of ``tenant`` and return the response, which may be a redirect or an error status.

        Raises:
            ForbiddenAddressError: an address of the host may not be called; nothing was sent.
            httpx.TransportError, OSError, TimeoutError: no response arrived.
        """
        async with asyncio.timeout(self._settings.timeout_s):
            response = await self._http.open("POST", url, headers, body.encode(), tenant=tenant)
            try:
                return Reply(response.status_code, await self._excerpt(response))
            finally:
                await response.aclose()

    async def _excerpt(self, response: httpx.Response) -> str:
        read = b""
        # Only the status matters, so a response that breaks off in its body counts.
        with contextlib.suppress(httpx.TransportError):
            # Raw, because decompressed data could become arbitrarily large.
            async for chunk in response.aiter_raw():
                read += chunk
                if len(read) >= self._settings.max_response_bytes:
                    break
        text = read[: 4 * MAX_EXCERPT_CHARS].decode(errors="replace")
        return "".join(char if char.isprintable() else " " for char in text)[:MAX_EXCERPT_CHARS].strip()


class Delivery:
    """Delivers events of one namespace.

    Args:
        num_slots: how many attempts this process can make concurrently.
    """

    def __init__(
        self,
        connection: CommandConnection,
        keys: Keys,
        store: EventStore,
        settings: WebhookSettings,
        num_slots: int,
    ) -> None:
        self._store = store
        self._secrets = SecretStore(connection, keys)
        self._settings = settings
        self._sender = Sender(settings)
        self._slots = TenantSlots(num_slots, MAX_PER_TENANT)
        self._num_in_flight: Counter[tuple[str, str]] = Counter()
        # By tenant: when its last deferred event is due again, in the time of the event loop.
        self._deferred_until: dict[str, float] = {}

    async def close(self) -> None:
        await self._sender.close()

    async def deliver(self, event_id: str) -> float | None:
        """Make the attempt that is due. Returns the delay in seconds before the next, or None if there is no next."""
        stored = await self._store.read(event_id)
        if stored is None or stored.event.state is not EventState.PENDING:
            return None
        event = stored.event
        # Within the longest delay. A later time means that a clock, here or on the host of the last attempt, was set
        # back.
        if 0 < (early_s := event.next_attempt_at - time.time()) <= self._settings.max_delay_s * (1 + JITTER):
            return early_s
        receiver = (event.tenant, urlsplit(event.url).netloc)
        with self._slots.occupy(event.tenant) as has_slot:
            if not has_slot or self._num_in_flight[receiver] >= MAX_PER_HOST:
                return self._pause_s(event.tenant)
            self._num_in_flight[receiver] += 1
            try:
                attempt, is_last = await self._attempt(event)
            finally:
                self._num_in_flight[receiver] -= 1
                if not self._num_in_flight[receiver]:
                    del self._num_in_flight[receiver]
        updated, delay_s = self._apply(event, attempt, is_last)
        if not await self._store.change(stored, updated, keep_delivered_s=self._settings.keep_delivered_s):
            return 0.0  # replayed or purged meanwhile: read it again
        if updated.state is EventState.DEAD:
            log.warning("webhook_event_given_up", event_id=event_id, url=mask_url(event.url), reason=attempt.error)
        return delay_s

    def _pause_s(self, tenant: str) -> float:
        """Return the delay in seconds of an event for which no place is free."""
        now = asyncio.get_running_loop().time()
        self._deferred_until = {name: until for name, until in self._deferred_until.items() if until > now}
        until = max(now + PAUSE_WHILE_BUSY_S, self._deferred_until.get(tenant, 0.0) + 1 / DEFERRED_PER_S)
        self._deferred_until[tenant] = until
        return until - now

    async def _attempt(self, event: WebhookEvent) -> tuple[WebhookAttempt, bool]:
        """Make one attempt. Returns it, and whether a failure is final."""
        at, started_at = time.time(), time.monotonic()

        def attempt(status: int = 0, error: str = "") -> WebhookAttempt:
            return WebhookAttempt(at=at, duration_s=time.monotonic() - started_at, status=status, error=error)

        secret = await self._secrets.find(event.tenant, event.url)
        if secret is None:
            return attempt(error=no_secret(event.tenant)), False
        try:
            reply = await self._sender.post(
                event.url, signed_headers(event, secret, at), event.body, tenant=event.tenant
            )
        except ForbiddenAddressError as error:
            return attempt(error=str(error)), True
        except TimeoutError:
            return attempt(error=f"no answer within {self._settings.timeout_s:g} s"), False
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            return attempt(error=f"{type(error).__name__}: {error}"), False
        if 200 <= reply.status < 300:
            return attempt(reply.status), False
        error = f"status {reply.status}" + (f": {reply.excerpt}" if reply.excerpt else "")
        return attempt(reply.status, error), reply.status == HTTPStatus.GONE

    def _apply(self, event: WebhookEvent, attempt: WebhookAttempt, is_last: bool) -> tuple[WebhookEvent, float | None]:
        """Return the event after an attempt, and the delay before the next."""
        num_attempts, delay_s = event.num_attempts + 1, None
        if attempt.error and not is_last:
            delay_s = self._settings.delay_s(num_attempts)
        if not attempt.error:
            state = EventState.DELIVERED
        elif delay_s is None:
            state = EventState.DEAD
        else:
            state = EventState.PENDING
            delay_s *= 1 + random.uniform(-JITTER, JITTER)
        updated = msgspec.structs.replace(
            event,
            state=state,
            num_attempts=num_attempts,
            next_attempt_at=0.0 if delay_s is None else time.time() + delay_s,
            attempts=[*event.attempts, attempt][-MAX_ATTEMPTS_SHOWN:],
        )
        return updated, delay_s


def signed_headers(event: WebhookEvent, secret: WebhookSecret, at: float) -> dict[str, str]:
    """Return the headers of Standard Webhooks for an attempt at Unix time ``at``, with a signature for each valid
    secret."""
    secrets = [secret.current, *([secret.previous] if secret.previous and at < secret.previous_until else [])]
    signed_at = datetime.fromtimestamp(int(at), UTC)
    return {
        "content-type": "application/json",
        "user-agent": "penstock",
        "webhook-id": event.event_id,
        "webhook-timestamp": str(int(at)),
        "webhook-signature": " ".join(Webhook(key).sign(event.event_id, signed_at, event.body) for key in secrets),
    }
