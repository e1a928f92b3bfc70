"""Follow one request: log and channel become one row of deltas without gap or repeat.

A record that comes next in what is known of the log is taken from the channel; one that was seen says nothing; any
other proves a gap, or that the log is another one than was known. Then the log, which got every record in the same
script that published it, is read from the last known record on (``taken_records.py``).

A Redis that crashed may come back without the last records it had sent (``appendfsync everysec`` promises no more).
The generation is then resumed at an earlier token, cut into other records: the log is read as a whole, and what lies
beyond what was taken is told. What comes again is held against that: tokens that differ are an error, since what the
caller has would go on with the end of another output.
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
    """An asynchronous iterator of a request's deltas. Deltas that wait for a slow caller are merged, not dropped; but
    those of different segments of a resumable request stay apart.

    Args:
        after: index of the last token the caller has; -1 for none. It must be the end of a delta.
        border: index of a token at which a delta shall begin, where the caller must tell apart what is before it.
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
        self._look_at_log = False
        # What comes by the channel while the log is read.
        self._held: list[Delta] | None = None
        self._is_silent = False
        # Whether Redis has ever known the request, as far as this reader can tell.
        self._was_known = False
        self._has_met_junk = False
        self._is_closed = False
        self._waiters: list[asyncio.Future[None]] = []
        self._subscription: Subscription | None = None

    async def subscribe(self) -> None:
        """Follow the channel; from here on nothing that is published is missed."""
        await self.begin()
        await self.subscribed()

    async def begin(self) -> None:
        """Ask for the channel; ``subscribed`` waits until it is followed."""
        self._subscription = await self._subscriber.begin(
            self._broker.keys.output(self._request_id), self._on_message, self.catch_up
        )

    async def subscribed(self) -> None:
        """Return when nothing that is published is missed any more; after ``begin``, once."""
        assert self._subscription is not None
        await self._subscription.confirmed

    async def follow_at(self, broker: Broker) -> None:
        """Follow the request in another partition than it was expected in; does nothing if it is the same one."""
        if broker is not self._broker:
            self.close()
            self._broker, self._is_closed = broker, False
            await self.subscribe()

    @property
    def partition(self) -> str:
        """By the name that keys know it by."""
        return self._broker.keys.name

    @property
    def request_id(self) -> str:
        return self._request_id

    @property
    def num_records(self) -> int:
        """How many records of the log it has taken."""
        return self._taken.num_records

    @property
    def log_key(self) -> str:
        """Of what was published."""
        return self._broker.keys.log(self._request_id)

    def take_silence(self) -> bool:
        """Whether nothing has come since this was last asked, and the end is still to come."""
        is_silent, self._is_silent = self._is_silent, True
        return is_silent and not self._taken.ended

    def catch_up(self) -> None:
        """Read the log before the next delta: something may have been published while nobody listened."""
        self._look_at_log = True
        self._wake()

    def expect_first(self) -> None:
        """The request has just been enqueued, and what comes is its first record, or proves a gap."""
        self._was_known = True

    @property
    def may_have_missed_first(self) -> bool:
        """Whether it waits and has heard nothing yet: something may have been published before it was subscribed."""
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
        """Whether the last delta has been handed to the caller."""
        return self._taken.ended and not self._pending

    def __aiter__(self) -> DeltaReader:
        return self

    async def __anext__(self) -> Delta:
        while True:
            if self._look_at_log:
                self._look_at_log = False
                try:
                    await self._read_log()
                except BaseException:
                    self._look_at_log = True  # the caller may come back: a conversation outlives a read with a timeout
                    raise
            if self._failure is not None:
                raise self._failure
            if self._pending:
                return self._pending.popleft()
            if self._taken.ended:
                raise StopAsyncIteration
            if not self._look_at_log:
                # An Event costs several times as much.
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
        """Take a record from the channel; what is wrong with it is this reader's caller's to hear, in its own turn.

        Anybody may publish anything: what is no record is passed over, and the log says what there is.
        """
        self._is_silent = False
        try:
            self._offer(_decoder.decode(record))
        except (ValidationError, OutputChangedError) as error:
            self._failure = error
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._look_at_log = True
            if not self._has_met_junk:  # told once: there may be a flood of it
                self._has_met_junk = True
                log.warning("record_undecodable", request_id=self._request_id, error=str(error))
        self._wake()

    def _offer(self, delta: Delta) -> None:
        """Take a record of the channel if it is the next one; have the log read if it neither is nor was seen."""
        taken = self._taken
        if taken.ended or self._look_at_log or (delta.segment_ends and taken.has_end_of(delta)):
            return  # of a log that is to be read, the log says where it belongs
        if self._held is not None:
            self._held.append(delta)
        elif (told := taken.take_next(delta)) is not None:
            self._tell(told)
        elif taken.is_beyond(delta):
            self._look_at_log = True

    def _tell(self, delta: Delta) -> None:
        self._was_known = True
        beyond = delta if delta.index >= self._skip_until else self._unskipped(delta)
        if beyond is None:
            return
        if self._border is not None and beyond.index < self._border < beyond.next_index:
            raise _inside(beyond, self._border)
        if self._pending and not self._pending[-1].segment_ends and beyond.index != self._border:
            self._pending[-1].extend(beyond)
        else:
            self._pending.append(beyond)

    def _unskipped(self, delta: Delta) -> Delta | None:
        """Return what is to be told of a delta that begins before what the caller wants; None if nothing is."""
        if delta.next_index > self._skip_until:
            raise _inside(delta, self._skip_until)
        if not delta.token_ids:
            return delta
        if not delta.finished:
            return None
        # The caller has its tokens; the end is told all the same, so that every stream has one.
        return msgspec.structs.replace(
            delta,
            index=delta.next_index,
            token_ids=[],
            text="",
            logprobs=[],
            prompt_logprobs=[],
            first_prompt_token=None,
        )

    async def _read_log(self) -> None:
        """Tell what the log has beyond what was taken, then what the channel has brought meanwhile."""
        was_known = self.num_records > 0
        self._held = held = []
        try:
            records = await self._broker.read_log(self._request_id, self._taken.first_read)
        finally:
            self._held = None
        told = self._taken.take_log(records)
        if told is None:
            self._look_at_log = True
            return
        for delta in told:
            self._tell(delta)
        for delta in held:
            self._offer(delta)
        if not was_known and not records and not self._taken.ended:
            await self._check_known()

    async def _check_known(self) -> None:
        if await self._broker.state(self._request_id) is not None:
            self._was_known = True
        elif self._was_known:
            raise RequestLostError(
                f"request {shown(self._request_id)} was under way, and Redis does not know it any more: it lost its "
                "data, or they were deleted; send it again"
            )
        else:
            raise RequestNotFoundError(
                f"request {shown(self._request_id)} is unknown, or its result is past its time to live"
            )


def _inside(delta: Delta, index: int) -> ValidationError:
    return ValidationError(
        f"after={index - 1} is inside the delta of tokens {delta.index} to {delta.next_index - 1}; "
        "pass next_index - 1 of a delta you have received"
    )


def without_error(delta: Delta) -> Delta:
    """Return ``delta``, or raise the error that it carries."""
    if delta.error is not None:
        raise from_wire(delta.error.code, delta.error.message, delta.error.retryable)
    return delta
