"""An attempt to deliver an event, and what follows from it.

    2xx: delivered. 410: the receiver wants no more. An address that may not be called: nobody tries again.
    Anything else, a redirect too: again after a delay that grows, until ``max_attempts``; then the dead letter.

An attempt is written down after it was made. So a process that dies in between makes the receiver see the event again,
with the same id: delivered at least once, and known by its id.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from datetime import UTC, datetime
from http import HTTPStatus
from urllib.parse import urlsplit

import httpx
import msgspec
from standardwebhooks import Webhook

from ...shared.connection import CommandConnection
from ...shared.keys import Keys
from ...shared.log import get_logger
from ...shared.urls import mask_url
from ..places import Places
from .event_records import EventState, WebhookAttempt, WebhookEvent, WebhookSecret
from .event_store import EventStore
from .secrets import SecretStore, no_secret
from .sender import ForbiddenAddressError, Sender
from .settings import WebhookSettings

MAX_ATTEMPTS_SHOWN = 20
# A receiver that answers slowly must not take all places of its tenant, and no tenant those of all others.
MAX_PER_HOST = 16
MAX_PER_TENANT = 24
PAUSE_WHILE_BUSY_S = 1.0
# Events that find no place are due again at this rate for each tenant. Due at the same time, a backlog of one tenant
# would stand before all events of others.
DEFERRED_PER_S = 200.0
JITTER = 0.1

log = get_logger(__name__)


class Delivery:
    """Delivers events of one namespace.

    Args:
        num_places: how many attempts this process can make at a time.
    """

    def __init__(
        self,
        connection: CommandConnection,
        keys: Keys,
        store: EventStore,
        settings: WebhookSettings,
        num_places: int,
    ) -> None:
        self._store = store
        self._secrets = SecretStore(connection, keys)
        self._settings = settings
        self._sender = Sender(settings)
        self._places = Places(num_places, MAX_PER_TENANT)
        self._under_way: Counter[tuple[str, str]] = Counter()
        # By tenant: when its last deferred event is due again, by the clock of the event loop.
        self._deferred_until: dict[str, float] = {}

    async def close(self) -> None:
        await self._sender.close()

    async def deliver(self, event_id: str) -> float | None:
        """Make the attempt that is due; returns in how many seconds the next is, or None if there is none."""
        stored = await self._store.read(event_id)
        if stored is None or stored.event.state is not EventState.PENDING:
            return None
        event = stored.event
        # Further ahead than any delay: this clock, or that of the host of the last attempt, was set back since.
        if 0 < (early_s := event.next_attempt_at - time.time()) <= self._settings.max_delay_s * (1 + JITTER):
            return early_s
        receiver = (event.tenant, urlsplit(event.url).netloc)
        with self._places.take(event.tenant) as has_place:
            if not has_place or self._under_way[receiver] >= MAX_PER_HOST:
                return self._pause_s(event.tenant)
            self._under_way[receiver] += 1
            try:
                attempt, is_last = await self._attempt(event)
            finally:
                self._under_way[receiver] -= 1
                if not self._under_way[receiver]:
                    del self._under_way[receiver]
        after, delay_s = self._after(event, attempt, is_last)
        if not await self._store.change(stored, after, keep_delivered_s=self._settings.keep_delivered_s):
            return 0.0  # replayed or purged meanwhile: look again
        if after.state is EventState.DEAD:
            log.warning("webhook_event_given_up", event_id=event_id, url=mask_url(event.url), reason=attempt.error)
        return delay_s

    def _pause_s(self, tenant: str) -> float:
        """Return in how many seconds an event is due again for which there is no place."""
        now = asyncio.get_running_loop().time()
        self._deferred_until = {name: until for name, until in self._deferred_until.items() if until > now}
        until = max(now + PAUSE_WHILE_BUSY_S, self._deferred_until.get(tenant, 0.0) + 1 / DEFERRED_PER_S)
        self._deferred_until[tenant] = until
        return until - now

    async def _attempt(self, event: WebhookEvent) -> tuple[WebhookAttempt, bool]:
        """Return the attempt, and whether no other is to follow it should it have failed."""
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

    def _after(self, event: WebhookEvent, attempt: WebhookAttempt, is_last: bool) -> tuple[WebhookEvent, float | None]:
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
        after = msgspec.structs.replace(
            event,
            state=state,
            num_attempts=num_attempts,
            next_attempt_at=0.0 if delay_s is None else time.time() + delay_s,
            attempts=[*event.attempts, attempt][-MAX_ATTEMPTS_SHOWN:],
        )
        return after, delay_s


def signed_headers(event: WebhookEvent, secret: WebhookSecret, at: float) -> dict[str, str]:
    """Return the headers of Standard Webhooks for an attempt at Unix time ``at``: a signature for each valid secret."""
    secrets = [secret.current, *([secret.previous] if secret.previous and at < secret.previous_until else [])]
    signed_at = datetime.fromtimestamp(int(at), UTC)
    return {
        "content-type": "application/json",
        "user-agent": "penstock",
        "webhook-id": event.event_id,
        "webhook-timestamp": str(int(at)),
        "webhook-signature": " ".join(Webhook(one).sign(event.event_id, signed_at, event.body) for one in secrets),
    }
