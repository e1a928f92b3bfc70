"""Life of a client: the process and event loop that may use it, its lease in Redis, and leases of single requests.

A dead client does not renew its lease, and a reaper cancels its interactive requests. It spares a request whose channel
has a subscriber, so a client that is only stopped or slow keeps its requests, and so does a second reader.

A forked child has the client's sockets but no task that reads them: it would wait for replies forever, and its writes
would mix with its parent's commands. A second event loop would have the same problem. ``ClientLifecycle`` refuses both.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import RedisError

from ...shared.broker import Broker
from ...shared.errors import ClientClosedError, PenstockError, ValidationError
from ...shared.process.log import get_logger
from ...shared.process.side_by_side import SideBySide
from ...shared.values.shown import shown

LEASE_TTL_S = 10.0
# Limit of waiting for Redis when a stream is left. A request that was not cancelled by then ends with the lease.
LEAVE_TIMEOUT_S = 5.0

log = get_logger(__name__)


# The lease is renewed when a third of it is over, so at least ``linger_s`` of it is left at any time.
LEASE_PER_LINGER = 1.5
# The clocks of client and Redis differ, and engines end their running requests at the deadline.
GRACE_S = 1.0


class InteractiveRequest:
    """A request that this client enqueued, or is enqueueing, and waits for.

    Args:
        broker: broker of the expected partition; replaced by that of the actual one once the request is enqueued.
        enqueueing: the call that enqueues it; returns whether the request is new, and the broker of its partition.
        linger_ms: for how long it continues after its caller has left; 0 cancels it immediately.
    """

    def __init__(
        self, broker: Broker, request_id: str, enqueueing: asyncio.Task[tuple[bool, Broker]], *, linger_ms: int = 0
    ) -> None:
        self.broker = broker
        self._linger_ms = linger_ms
        self._request_id = request_id
        self._enqueueing = enqueueing

    async def is_ours(self) -> bool:
        """Wait until it is enqueued. Returns False if another client had enqueued it. Raises the error of the call."""
        is_new, self.broker = await asyncio.shield(self._enqueueing)
        return is_new

    async def leave(self) -> None:
        """Let it linger, or cancel it, if this client enqueued it.

        Only the answer of the enqueue call tells that, so this waits for it.
        """
        leaving = asyncio.create_task(self._end_unanswered())
        await asyncio.wait([leaving], timeout=LEAVE_TIMEOUT_S)

    async def _end_unanswered(self) -> None:
        # The waiting caller got the error of the call. If the request exists anyway, it ends with the lease.
        with contextlib.suppress(Exception):
            if not await self.is_ours():
                return
            if self._linger_ms:
                await self.broker.leave(self._request_id, self._linger_ms)
            else:
                await self.broker.cancel(self._request_id)


class ClientLease:
    """Renews the lease of a client with every model of its interactive requests. Costs nothing while there are none.

    Args:
        ttl_s: for how long the requests outlive the last renewal, in seconds; a third of it is the interval.
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
            self._renewing = asyncio.create_task(self._renew_lease())

    def let_go(self, request: InteractiveRequest) -> None:
        """Remove a request that has ended or belongs to another client. A second call does nothing."""
        self._held.discard(request)
        if not self._held and self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None

    async def close(self) -> None:
        """Cancel the requests of the lease, and stop renewing it."""
        await asyncio.gather(*(request.leave() for request in self._held))
        for request in tuple(self._held):
            self.let_go(request)

    async def _renew_lease(self) -> None:
        """Renew the lease until cancelled. Enqueueing has just set it, so the first renewal is an interval later."""
        renewals = SideBySide[Broker](lambda broker: broker.renew_client(self.client_id, self.ttl_ms))
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                for error in await renewals.round({request.broker for request in self._held}, self._interval_s):
                    # The next renewal retries after any error, such as rights that the user lacks for a moment.
                    log.warning("client_lease_not_renewed", error=str(error))
        finally:
            await renewals.close()


@contextmanager
def lingering(broker: Broker, request_id: str, linger_s: float) -> Iterator[None]:
    """Keep an interactive request running for ``linger_s`` after the block. 0 does nothing.

    The first reader gives the request a lease of its own when it leaves (``InteractiveRequest.leave``). Other readers
    renew that lease here, so it makes no difference whether a reader leaves or its process dies.
    """
    if not linger_s:
        yield
        return
    renewing = asyncio.create_task(_renew_forever(broker, request_id, linger_s))
    try:
        yield
    finally:
        renewing.cancel()


async def _renew_forever(broker: Broker, request_id: str, linger_s: float) -> None:
    lease_ms = max(1, int(linger_s * LEASE_PER_LINGER * 1000))
    while True:
        try:
            await broker.leave(request_id, lease_ms)
        except (PenstockError, RedisError) as error:
            log.warning("request_lease_not_renewed", request_id=request_id, error=str(error))
        await asyncio.sleep(linger_s / 2)


@contextmanager
def ended_when_due(request: InteractiveRequest, due_in_s: float | None) -> Iterator[None]:
    """Call the broker's ``expire`` from the deadline of the request on, until the block is left."""
    if due_in_s is None:
        yield
        return
    sweeping = asyncio.create_task(_sweep(request, due_in_s))
    try:
        yield
    finally:
        sweeping.cancel()


async def _sweep(request: InteractiveRequest, due_in_s: float) -> None:
    await asyncio.sleep(max(0.0, due_in_s) + GRACE_S)
    while True:
        # Redis may be away; the reader of the request waits for it as well.
        with contextlib.suppress(PenstockError, RedisError):
            await request.broker.expire()
        await asyncio.sleep(GRACE_S)


class ClientLifecycle:
    """State of a client: open or closed, and in which process and event loop."""

    def __init__(self) -> None:
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_open(self) -> bool:
        """Whether the client is open in this process."""
        return self._loop is not None and not self.is_forked

    @property
    def is_forked(self) -> bool:
        """Whether the client was opened by a process from which this one was forked."""
        return self._loop is not None and self._pid != os.getpid()

    def open(self) -> None:
        """Mark the client as open in this process and the running event loop."""
        self._pid, self._loop = os.getpid(), asyncio.get_running_loop()

    def close(self) -> None:
        """Mark the client as closed."""
        self._loop = None

    def check(self) -> None:
        """Return if the caller may use the client. Without a running event loop, a caller may create iterators for
        later.

        Raises:
            ClientClosedError: the client is not connected, or belongs to another process or event loop.
        """
        if self._loop is None:
            raise ClientClosedError("the client is not connected; use it inside `async with Client.connect(url)`")
        if self.is_forked:
            raise ClientClosedError(
                f"the client was connected by process {self._pid}, which forked this one; connect after the fork "
                "(gunicorn: without --preload, or in post_fork), or use LLM, which connects anew by itself"
            )
        if _running_loop() not in (None, self._loop):
            raise ClientClosedError(
                "the client was connected in another event loop; use it in that one (under WSGI each async view has a "
                "loop of its own: use LLM there), or connect in this one"
            )


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
