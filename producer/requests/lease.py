"""The requests that live by this client: its lease in Redis, renewed while there are some.

A client that dies renews no more, and a reaper cancels what it streamed or awaited. It spares a request that somebody
still listens to, so one that is only stopped, or slow, keeps its requests, and so does a second reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import socket

from ...shared.broker import Broker
from ...shared.errors import RedisUnavailableError, ValidationError
from ...shared.process.log import get_logger
from ...shared.process.side_by_side import SideBySide
from ...shared.values.shown import shown

LEASE_TTL_S = 10.0
# Leaving a stream waits no longer for Redis; what could not be cancelled by then ends with the lease.
LEAVE_TIMEOUT_S = 5.0

log = get_logger(__name__)


class InteractiveRequest:
    """A request that this client enqueued, or is enqueueing, and waits for.

    Args:
        broker: of the partition that it is expected in; ``broker`` is that of the one it is in, once it is enqueued.
        enqueueing: the call; its result says whether it made the request, or found one of that id, and where that is.
        linger_ms: how long it shall go on after it was left; 0 cancels it at once.
    """

    def __init__(
        self, broker: Broker, request_id: str, enqueueing: asyncio.Task[tuple[bool, Broker]], *, linger_ms: int = 0
    ) -> None:
        self.broker = broker
        self._linger_ms = linger_ms
        self._request_id = request_id
        self._enqueueing = enqueueing

    async def is_ours(self) -> bool:
        """Wait until it is enqueued; False if somebody else had made it. Raises what the call raised."""
        is_new, self.broker = await asyncio.shield(self._enqueueing)
        return is_new

    async def leave(self) -> None:
        """Let it linger, or cancel it, if it is ours.

        Only the answer of the call says that, so the caller has to wait for it.
        """
        leaving = asyncio.create_task(self._leave())
        await asyncio.wait([leaving], timeout=LEAVE_TIMEOUT_S)

    async def _leave(self) -> None:
        # What went wrong with the call was told to whoever waited for it; the lease ends what made it all the same.
        with contextlib.suppress(Exception):
            if not await self.is_ours():
                return
            if self._linger_ms:
                await self.broker.leave(self._request_id, self._linger_ms)
            else:
                await self.broker.cancel(self._request_id)


class ClientLease:
    """Renews the client's lease with every model that it has interactive requests of; costs nothing while it has none.

    Args:
        ttl_s: how long the requests outlive the last renewal; it is renewed three times as often.
    """

    def __init__(self, ttl_s: float) -> None:
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s < math.inf:
            raise ValidationError(f"lease_ttl_s must be positive and finite, got {shown(ttl_s)}")
        self.client_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.ttl_ms = max(1, int(ttl_s * 1000))
        self._interval_s = ttl_s / 3
        self._held: set[InteractiveRequest] = set()
        self._renewing: asyncio.Task[None] | None = None

    def hold(self, request: InteractiveRequest) -> None:
        """Keep the lease alive for ``request``."""
        self._held.add(request)
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew())

    def let_go(self, request: InteractiveRequest) -> None:
        """It has ended, or is not ours; doing it twice does nothing."""
        self._held.discard(request)
        if not self._held and self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None

    async def close(self) -> None:
        """Cancel what lives by the lease, and let it end."""
        await asyncio.gather(*(request.leave() for request in self._held))
        for request in tuple(self._held):
            self.let_go(request)

    async def _renew(self) -> None:
        """Enqueueing a request has just set the lease, so the first renewal is due an interval later."""
        renewals = SideBySide[Broker](lambda broker: broker.renew_client(self.client_id, self.ttl_ms))
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                for error in await renewals.round({request.broker for request in self._held}, self._interval_s):
                    if not isinstance(error, RedisUnavailableError):
                        raise error
                    log.warning("client_lease_not_renewed", error=str(error))
        finally:
            await renewals.close()
