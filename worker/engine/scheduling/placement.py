"""Admits requests to the running queue with their blocks, and preempts the last ones when blocks run out."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from ....shared.messages.core import EngineCoreEventType
from .admission import Residency
from .batches import Flights
from .block_pool import BlockPool, InvariantError
from .block_tables import BlockTables
from .ordering import RequestQueue
from .prefix_cache import PrefixCache
from .request import Request, RequestStatus, Timeline
from .scheduler_output import SchedulerOutput


class Placement:
    """The part of ``Scheduler`` that assigns blocks.

    Args:
        running, waiting: the scheduler's queues. Preemption moves a request from ``running`` to ``waiting``; the
            scheduler itself moves an admitted request.

    Attributes:
        num_preemptions: preemptions since the start.
    """

    def __init__(
        self,
        running: RequestQueue,
        waiting: RequestQueue,
        block_pool: BlockPool,
        tables: BlockTables,
        prefix_cache: PrefixCache,
        residency: Residency,
        flights: Flights,
        timeline: Timeline,
    ) -> None:
        self._running = running
        self._waiting = waiting
        self._block_pool = block_pool
        self._tables = tables
        self._prefix_cache = prefix_cache
        self._residency = residency
        self._flights = flights
        self._timeline = timeline
        self._is_short_of_blocks = False
        self._released_ids: list[str] = []
        self.num_preemptions = 0

    def begin(self) -> None:
        """Begin to choose the work of a step."""
        self._is_short_of_blocks = False

    def try_to_admit(self, request: Request, budget: int, output: SchedulerOutput) -> bool:
        """Give a waiting request blocks for all its known tokens, cached blocks included.

        Return False if too few blocks are free, if a running request waits for blocks, if ``output`` or a batch in
        flight computes for another request all that ``budget`` lets this one compute now, if it is in flight itself, or
        if running requests use all adapter slots.
        """
        if self._is_short_of_blocks or not self._flights.may_enter(request):
            return False
        cached = self._prefix_cache.find(request)
        num_cached_tokens = len(cached) * self._block_pool.block_size
        if not self._tables.can_admit(request, cached):
            return False
        work = chain(output.work(), self._flights.work())
        if self._prefix_cache.is_being_computed(request, num_cached_tokens + budget, work):
            return False
        if not self._residency.acquire_slot(request):
            return False
        self._tables.admit(request, cached)
        request.num_computed_tokens = num_cached_tokens
        self._prefix_cache.record_admission(request)
        request.move_to(RequestStatus.RUNNING)
        self._timeline.record(request, EngineCoreEventType.SCHEDULED)
        return True

    def grow_blocks(self, request: Request, num_tokens: int) -> bool:
        """Give ``request`` blocks for ``num_tokens`` in total, and preempt the last running requests if necessary.

        Return False if ``request`` was preempted itself, or if the last one is in flight: its blocks are available
        after its batch.
        """
        self._tables.free_unneeded(request)
        num_blocks = self._tables.num_missing(request, num_tokens)
        while num_blocks > self._block_pool.num_free:
            if not self._flights.may_preempt(self._running[-1]):
                self._is_short_of_blocks = True
                return False
            if self.preempt_last() is request:
                return False
        self._tables.grow(request, num_tokens)
        return True

    def preempt_last(self) -> Request:
        """Move the last running request back to its place in the waiting queue, without blocks; return it."""
        last = self._running.pop(-1)
        self.release(last)
        last.num_computed_tokens = 0
        last.move_to(RequestStatus.PREEMPTED)
        self._waiting.add(last)
        self.num_preemptions += 1
        self._timeline.record(last, EngineCoreEventType.PREEMPTED)
        return last

    def release(self, request: Request) -> None:
        """Release the blocks and the adapter slot of ``request``."""
        self._residency.release_slot(request)
        if request.block_table:
            self._tables.release(request)
            self._released_ids.append(request.request_id)

    def pop_released_ids(self) -> list[str]:
        """Return ids of requests that lost their blocks since the last call, for the next step."""
        released_ids, self._released_ids = self._released_ids, []
        return released_ids

    def restore_released_ids(self, released_ids: list[str]) -> None:
        """Undo ``pop_released_ids`` for a step that will not be executed."""
        self._released_ids = released_ids + self._released_ids


def check_requests(running: list[Request], waiting: list[Request], known: Iterable[str]) -> None:
    """Verify that the queues hold exactly the known requests, each with a status that matches its queue.

    Raises:
        InvariantError: they do not.
    """
    if sorted(request.request_id for request in running + waiting) != sorted(known):
        raise InvariantError("the queues do not hold exactly the known requests")
    if any(request.status is not RequestStatus.RUNNING for request in running):
        raise InvariantError("a request in the running queue has another status")
    may_wait = RequestStatus.WAITING, RequestStatus.PREEMPTED
    if any(request.status not in may_wait or request.block_table for request in waiting):
        raise InvariantError("a request in the waiting queue is running, is finished, or holds blocks")


def check_tokens(running: list[Request], pool: BlockPool, max_model_len: int) -> None:
    """Verify that running requests have blocks for their computed tokens, and at least one token to compute.

    Raises:
        InvariantError: a request has not.
    """
    for request in running:
        if not 0 <= request.num_computed_tokens < request.num_tokens <= max_model_len:
            raise InvariantError(f"request {request.request_id} has impossible token counts")
        if len(request.block_table) < pool.blocks_for(request.num_computed_tokens):
            raise InvariantError(f"request {request.request_id} has fewer blocks than computed tokens")
