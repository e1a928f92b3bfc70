"""Follow one request: combine its log and its channel into one sequence of deltas without gap or repeat.

A record of the channel that continues the known part of the log is delivered. A record that was seen is ignored. Any
other record proves that a record is missing or that the log was rewritten. Then the log is read from the last known
record on (``taken_records.py``). It has every record, because the script that publishes a record also logs it.

A Redis that crashed may come back without the last records it had sent (``appendfsync everysec`` promises no more).
The generation is then resumed at an earlier token and cut into other records. The whole log is read, and only its
tokens after the delivered ones are delivered. Repeated tokens are compared with the delivered ones. A difference is an
error, because the caller's text would continue with the end of another output.
"""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from ...shared.broker import Broker
from ...shared.connection import Subscriber, Subscription
from ...shared.errors import OutputChangedError, RequestLostError, RequestNotFoundError, ValidationError, from_wire
from ...shared.messages.deltas import Delta
from ...shared.process.log import get_logger
from ...shared.values.shown import shown
from .taken_records import TakenRecords

_decoder = msgspec.msgpack.Decoder(Delta)
log = get_logger(__name__)


class DeltaReader:
    """Asynchronous iterator of a request's deltas.

    Deltas that wait for a slow caller are merged, not dropped. Deltas of different segments of a resumable request are
    never merged.

    Args:
        after: index of the last token the caller has; -1 for none.
        border: index of a token at which a delta must begin, so that the caller can separate the tokens before it.
    """

    def __init__(
        self,
        broker: Broker,
        subscriber: Subscriber,
        request_id: str,
        after: int = -1,
        *,
        border: int | None = None,
    ) -> None:
        self._broker = broker
        self._subscriber = subscriber
        self._request_id = request_id
        self._skip_until = after + 1
        self._border = border
        self._taken = TakenRecords(request_id)
        self._pending: deque[Delta] = deque()
        self._failure: BaseException | None = None
        self._must_read_log = False
        # Records that arrive by the channel while the log is read.
        self._held: list[Delta] | None = None
        self._is_silent = False
        # Whether the request is known to have existed in Redis.
        self._has_existed = False
        self._has_logged_undecodable = False
        self._is_closed = False
        self._waiters: list[asyncio.Future[None]] = []
        self._subscription: Subscription | None = None

    async def subscribe(self) -> None:
        """Subscribe to the channel. No record that is published after this is missed."""
        await self.begin()
        await self.subscribed()

    async def begin(self) -> None:
        """Send the subscription; ``subscribed`` waits for its confirmation."""
        self._subscription = await self._subscriber.begin(
            self._broker.keys.output(self._request_id), self._on_message, self.catch_up
        )

    async def subscribed(self) -> None:
        """Wait for the confirmation of the subscription. Call it once, after ``begin``."""
        assert self._subscription is not None
        await self._subscription.confirmed

    async def follow_at(self, broker: Broker) -> None:
        """Move to the partition that has the request, if it is not the expected one."""
        if broker is not self._broker:
            self.close()
            self._broker, self._is_closed = broker, False
            await self.subscribe()

    @property
    def partition(self) -> str:
        """Name of the partition in keys."""
        return self._broker.keys.name

    @property
    def request_id(self) -> str:
        return self._request_id

    @property
    def num_records(self) -> int:
        """Number of records of the log that were read or received."""
        return self._taken.num_records

    @property
    def log_key(self) -> str:
        """Key of the log."""
        return self._broker.keys.log(self._request_id)

    def was_silent_since_last_call(self) -> bool:
        """Return whether no message has arrived since the last call, and the request has not ended."""
        is_silent, self._is_silent = self._is_silent, True
        return is_silent and not self._taken.ended

    def catch_up(self) -> None:
        """Read the log before the next delta, because records may have been published without a subscriber."""
        self._must_read_log = True
        self._wake()

    def expect_first_record(self) -> None:
        """Note that the request was just enqueued: the next record is its first one, or proves a gap."""
        self._has_existed = True

    @property
    def may_have_missed_first(self) -> bool:
        """Whether no record has arrived yet. One may have been published before the subscription."""
        return not (self.num_records or self._is_closed)

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` to the caller instead of the next delta."""
        self._failure = error
        self._wake()

    def close(self) -> None:
        """Stop following; doing it twice does nothing."""
        self._is_closed = True
        if self._subscription is not None:
            self._subscriber.unsubscribe(self._subscription)

    @property
    def ended(self) -> bool:
        """Whether the caller has received the last delta."""
        return self._taken.ended and not self._pending

    def __aiter__(self) -> DeltaReader:
        return self

    async def __anext__(self) -> Delta:
        while True:
            if self._must_read_log:
                self._must_read_log = False
                try:
                    await self._read_log()
                except BaseException:
                    self._must_read_log = True  # a conversation may be read again after a read with a timeout
                    raise
            if self._failure is not None:
                raise self._failure
            if self._pending:
                return self._pending.popleft()
            if self._taken.ended:
                raise StopAsyncIteration
            if not self._must_read_log:
                # A future, because an Event costs several times as much.
                waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiters.append(waiter)
                await waiter

    def _wake(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _on_message(self, record: bytes) -> None:
        """Handle a record of the channel. An error in it is raised to the caller with the next delta.

        Any client of Redis may publish to the channel, so an undecodable message is skipped and the log is read.
        """
        self._is_silent = False
        try:
            self._offer(_decoder.decode(record))
        except (ValidationError, OutputChangedError) as error:
            self._failure = error
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._must_read_log = True
            if not self._has_logged_undecodable:  # once, because there may be a flood of them
                self._has_logged_undecodable = True
                log.warning("record_undecodable", request_id=self._request_id, error=str(error))
        self._wake()

    def _offer(self, delta: Delta) -> None:
        """Deliver a record if it is the next one. Have the log read if it is neither the next nor a known one."""
        records = self._taken
        if records.ended or self._must_read_log or (delta.segment_ends and records.has_end_of(delta)):
            return  # the log will be read, and gives the place of this record
        if self._held is not None:
            self._held.append(delta)
        elif (unseen := records.take_next(delta)) is not None:
            self._deliver(unseen)
        elif records.is_beyond(delta):
            self._must_read_log = True

    def _deliver(self, delta: Delta) -> None:
        self._has_existed = True
        unseen = delta if delta.index >= self._skip_until else self._strip_skipped(delta)
        if unseen is None:
            return
        if self._border is not None and unseen.index < self._border < unseen.next_index:
            head, unseen = unseen.split(self._border)
            self._add_pending(head)
        self._add_pending(unseen)

    def _add_pending(self, unseen: Delta) -> None:
        if self._pending and not self._pending[-1].segment_ends and unseen.index != self._border:
            self._pending[-1].extend(unseen)
        else:
            self._pending.append(unseen)

    def _strip_skipped(self, delta: Delta) -> Delta | None:
        """Return the part of ``delta`` that the caller lacks; None if the caller has it all."""
        if delta.next_index > self._skip_until:
            return delta.split(self._skip_until)[1]
        if not delta.token_ids:
            return delta
        if not delta.finished:
            return None
        # The caller has its tokens, but every stream must have an end.
        return msgspec.structs.replace(
            delta,
            index=delta.next_index,
            token_ids=[],
            text="",
            logprobs=[],
            prompt_logprobs=[],
            first_prompt_token=None,
            text_ends=[],
        )

    async def _read_log(self) -> None:
        """Deliver the new part of the log, then the records that arrived by the channel meanwhile."""
        was_known = self.num_records > 0
        self._held = arrived = []
        try:
            records = await self._broker.read_log(self._request_id, self._taken.first_read)
        finally:
            self._held = None
        unseen = self._taken.take_log(records)
        if unseen is None:
            self._must_read_log = True
            return
        for delta in unseen:
            self._deliver(delta)
        for delta in arrived:
            self._offer(delta)
        if not was_known and not records and not self._taken.ended:
            await self._check_known()

    async def _check_known(self) -> None:
        if await self._broker.state(self._request_id) is not None:
            self._has_existed = True
        elif self._has_existed:
            raise RequestLostError(
                f"request {shown(self._request_id)} was running, but is no longer in Redis: data was lost or deleted; "
                "send the request again"
            )
        else:
            raise RequestNotFoundError(f"request {shown(self._request_id)} is unknown, or its result has expired")


def without_error(delta: Delta) -> Delta:
    """Return ``delta``, or raise the error that it carries."""
    if delta.error is not None:
        raise from_wire(delta.error.code, delta.error.message, delta.error.retryable)
    return delta
