"""Decides which tokens of which requests the next step computes.

The algorithm, by its invariant: there is one budget of tokens per step and no separate prefill phase. Every request
has ``num_tokens`` known tokens, of which ``num_computed_tokens`` are in the KV cache; each step gives each running
request some of the tokens it lacks, and a request that has caught up gets one new token, so that it lacks one again.
Prefill, chunked prefill, decode, recomputation after preemption and resumption after a crash are all this one case.

Running requests come first, each with at least one token, then waiting ones in the policy's order. A request is
admitted when blocks for all its known tokens are free, and takes them at once. When a running request needs a block
and none is free, the last one in the order is preempted: it loses its blocks and waits at its old place. Since the pool
holds at least one request of ``max_model_len``, the first one in the order always advances. ``block_tables.py`` decides
how many blocks a request needs, and which ones it frees while it runs.

Blocks that already hold the beginning of a request count as computed when it is admitted, except for its last token.
Requests share such blocks; no request writes to them, because they are full. If all that a request could compute in
this step is being computed for another request, it waits for the next step and finds the blocks then.

Running requests are visited in the policy's order too, so a preempted request has no work in this step that would have
to be undone. (vLLM visits them in the order of admission; with priorities it had requests that were preempted after
their work was scheduled, issue 23316, and others that were skipped, issue 49097.) Only a running request that needs a
block preempts: as in vLLM's V1 (issue 40004), a waiting request never displaces a running one, however urgent it is.
But the budget that a preempted request leaves may go, in the same step, to a waiting request that precedes it.
"""

from __future__ import annotations

from collections.abc import Iterable

from ....shared.errors import ConfigurationError
from ....shared.messages.core import EngineCoreEventType, EngineCoreOutput, SchedulerStats
from ....shared.messages.outcome import FinishReason, RequestError
from .admission import BlockLoads, NoLoads, NoResidency, Residency
from .batches import Flights, OneFlight
from .block_pool import BlockPool
from .block_tables import BlockTables, SingleBlockTable
from .chunking import AnyChunks, Chunking, PromptRowBudget
from .drafting import Drafting, NoDrafting
from .ordering import FirstComeFirstServed, OrderingPolicy, RequestQueue
from .placement import Placement, check_requests, check_tokens
from .prefix_cache import NoPrefixCache, PrefixCache
from .prompt_inputs import uncut_chunk
from .request import STATUS_OF_REASON, NoTimeline, Request, RequestStatus, Timeline
from .scheduler_output import SampledTokens, SchedulerOutput, make_output, make_pooled_output
from .stop import append_tokens_until_stop, check_stop


class Scheduler:
    """Owns every unfinished request and all block tables.

    Raises:
        ConfigurationError: the pool cannot hold one request of ``max_model_len``, or the budget is below one token
            per running request.
    """

    def __init__(
        self,
        block_pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: OrderingPolicy | None = None,
        prefix_cache: PrefixCache | None = None,
        timeline: Timeline | None = None,
        drafting: Drafting | None = None,
        residency: Residency | None = None,
        flights: Flights | None = None,
        tables: BlockTables | None = None,
        chunking: Chunking | None = None,
        loads: BlockLoads | None = None,
    ) -> None:
        tables = tables or SingleBlockTable(block_pool)
        if tables.max_blocks_for(max_model_len) > block_pool.num_blocks:
            raise ConfigurationError(
                f"the KV cache has {block_pool.num_blocks} blocks of {block_pool.block_size} tokens, too few for one "
                f"request of max_model_len {max_model_len}"
            )
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) is below max_num_seqs ({max_num_seqs})"
            )
        self.block_pool = block_pool
        self._tables = tables
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        policy = policy or FirstComeFirstServed()
        self._prefix_cache = prefix_cache or NoPrefixCache()
        self._chunking = chunking or AnyChunks()
        self._timeline = timeline or NoTimeline()
        self._drafting = self._enabled_drafting = drafting or NoDrafting()
        # Not ``flights or``, because a queue of batches is false when none is in flight.
        self._flights = OneFlight() if flights is None else flights
        self._running = RequestQueue(policy)
        self._waiting = RequestQueue(policy)
        self._placement = Placement(
            self._running,
            self._waiting,
            block_pool,
            tables,
            self._prefix_cache,
            # Not ``residency or``, because it is false while no request waits.
            NoResidency() if residency is None else residency,
            self._flights,
            self._timeline,
        )
        self._loads = loads or NoLoads()
        self._loads.attach(self._running, self._waiting)
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0
        self._num_steps = 0
        self._num_generation_tokens = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    def add_request(self, request: Request) -> None:
        """Queue a new request after all earlier arrivals. Its id must be unknown."""
        request.arrival_index = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self._waiting.add(request)
        self._timeline.record(request, EngineCoreEventType.QUEUED)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's work and allocate its blocks."""
        self._loads.begin_step()
        output = SchedulerOutput()
        budget = self.max_num_batched_tokens
        prompt_rows = PromptRowBudget()
        token_capacity, flights, placement = self._tables.token_capacity, self._flights, self._placement
        placement.begin()
        room = flights.room(len(self._running))
        for index, request in enumerate(flights.free(self._running, room)):  # ``grow`` may remove the last
            num_computed_tokens = request.num_computed_tokens
            num_new_tokens = len(request.token_ids) - num_computed_tokens
            if request.num_in_flight_tokens:
                num_computed_tokens, num_new_tokens = request.after_flight()
                if num_new_tokens == 0:
                    continue  # its last token is on its way
            if num_new_tokens > 1:
                # Reserve one token for each running request after this one, so that a long prefill delays no decode.
                num_new_tokens = min(num_new_tokens, budget - (min(room, len(self._running)) - index - 1))
                num_new_tokens = self._chunk(request, num_computed_tokens, num_new_tokens, prompt_rows)
                if num_new_tokens == 0:
                    continue  # it waits for a step with a larger budget
            num_tokens = num_computed_tokens + num_new_tokens
            if num_tokens > token_capacity(request) and not placement.grow_blocks(request, num_tokens):
                break
            output.add(request, num_new_tokens)
            budget -= num_new_tokens
        max_num_seqs = self.max_num_seqs - flights.num_leaving
        room = flights.room(min(len(self._running) + len(self._waiting), self.max_num_seqs))
        while self._waiting and budget > 0 and len(self._running) < max_num_seqs and len(output.requests) < room:
            request = self._waiting[0]
            if not self._chunking.admits(request, self.max_num_batched_tokens - budget, budget):
                break
            if not placement.try_to_admit(request, budget, output):
                break
            self._loads.forget(request.request_id)
            self._running.add(self._waiting.pop(0))
            num_new_tokens = min(request.num_uncomputed_tokens, budget)
            num_new_tokens = self._chunk(request, request.num_computed_tokens, num_new_tokens, prompt_rows)
            if num_new_tokens:
                output.add(request, num_new_tokens)
                budget -= num_new_tokens
        output.released_ids = placement.pop_released_ids()
        self._drafting.extend(output, self._tables)
        return output

    def undo_schedule(self, output: SchedulerOutput) -> None:
        """Cancel ``output``, the last one scheduled, before it is executed; its tokens will be scheduled again."""
        self._placement.restore_released_ids(output.released_ids)

    def update_from_output(self, output: SchedulerOutput, sampled: SampledTokens) -> list[EngineCoreOutput]:
        """Apply a step's result, and return the outputs for the requests' callers.

        Requests that finished meanwhile are skipped. Draft tokens count as computed as far as they were accepted.
        """
        self._num_steps += 1
        outputs: list[EngineCoreOutput] = []
        finished, num_generation_tokens, logprobs = False, 0, sampled.logprobs
        block_size, running = self.block_pool.block_size, RequestStatus.RUNNING
        rows = zip(output.requests, output.num_new_tokens, sampled.token_ids, strict=True)
        for request, num_new_tokens, token_ids in rows:
            if request.is_finished:
                continue
            num_sampled = len(token_ids)
            if num_sampled == 1 and request.constraint is None:
                request.token_ids.append(token_ids[0])
                stop = check_stop(request)
            else:
                stop = append_tokens_until_stop(request, token_ids)
            if request.status is running:  # else it was preempted meanwhile; its tokens stay valid
                if num_new_tokens > 1:
                    num_inputs = len(request.token_ids) - (1 if token_ids else 0)  # the last token was no input
                    num_new_tokens = min(num_new_tokens, num_inputs - request.num_computed_tokens)
                request.num_computed_tokens += num_new_tokens
                if request.num_computed_tokens % block_size < num_new_tokens:
                    self._prefix_cache.record_computed(request, num_new_tokens)
                    self._tables.free_unneeded(request)
            if request.prompt_logprobs is not None:
                request.prompt_logprobs += sampled.prompt_logprobs.get(request.request_id, ())
            if not num_sampled:
                if sampled.pooled and request.request_id in sampled.pooled:
                    self._finish_in_step(request, RequestStatus.FINISHED_STOPPED)
                    outputs.append(make_pooled_output(request, sampled.pooled[request.request_id]))
                    finished = True
                continue
            num_generation_tokens += len(token_ids)
            new_output = make_output(request, token_ids, logprobs.get(request.request_id) if logprobs else None)
            if stop is not None:
                new_output.finish_reason, new_output.stop_reason, new_output.error = stop
                self._finish_in_step(request, STATUS_OF_REASON[stop.reason])
                finished = True
            outputs.append(new_output)
        self._num_generation_tokens += num_generation_tokens
        for place, drafts in output.drafts.items():
            num_accepted = max(0, len(sampled.token_ids[place]) - 1)
            self._drafting.record_accepted(output.requests[place], len(drafts), num_accepted)
        if finished:
            self._running.drop_finished()
        return outputs

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        """End requests from outside; unknown and finished ids are ignored."""
        request_ids = list(request_ids)
        self._loads.requeue(request_ids)
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            queue = self._running if request.status is RequestStatus.RUNNING else self._waiting
            queue.remove(request)
            self._finish(request, status)

    def fail_batch(self, output: SchedulerOutput, error: RequestError) -> list[EngineCoreOutput]:
        """End every request of a failed step."""
        failed = [request.request_id for request in output.requests if not request.is_finished]
        self.finish_requests(failed, RequestStatus.FINISHED_ERROR)
        self._num_steps += 1
        return [EngineCoreOutput(request_id, finish_reason=FinishReason.ERROR, error=error) for request_id in failed]

    def wait(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until there may be work, after a ``schedule`` that found none."""
        self._loads.wait(timeout_s)

    def set_drafting(self, is_on: bool) -> None:
        """Switch drafting on or off from the next step on, in an engine that has it. Benchmarks compare the two."""
        self._drafting = self._enabled_drafting if is_on else NoDrafting()

    def forget_blocks(self) -> bool:
        """Forget the contents of free blocks; return False and do nothing while any block is in use.

        No block is read from or written to storage afterwards, unless a disk hangs.
        """
        self._loads.drain()
        return self.block_pool.forget_hashes()

    def reset_prefix_cache(self) -> bool:
        """Forget the contents of free blocks as ``forget_blocks`` does, and copies of blocks stored elsewhere.

        Drafting forgets the output of finished requests in any case.
        """
        self._drafting.forget_texts()
        if not self.forget_blocks():
            return False
        self._loads.clear_storage()
        return True

    def stats(self) -> SchedulerStats:
        """Return the current state; counters run since the start."""
        return SchedulerStats(
            num_running_reqs=len(self._running),
            num_waiting_reqs=len(self._waiting) + sum(1 for _ in self._loads.requests()),
            step_counter=self._num_steps,
            kv_cache_usage=self.block_pool.usage,
            num_preemptions=self._placement.num_preemptions,
            num_generation_tokens=self._num_generation_tokens,
            prefix_cache_queries=self._prefix_cache.num_queried_tokens,
            prefix_cache_hits=self._prefix_cache.num_hit_tokens,
            num_draft_tokens=self._drafting.num_draft_tokens,
            num_accepted_tokens=self._drafting.num_accepted_tokens,
            kv_offload=self._loads.stats(),
        )

    def check_invariants(self) -> None:
        """Verify queues, statuses and block tables against each other.

        Raises:
            InvariantError: they disagree.
        """
        self._loads.collect()
        self._running.check_invariants()
        self._waiting.check_invariants()
        running = list(self._running)
        check_requests(running, [*self._waiting, *self._loads.requests()], self._requests)
        check_tokens(running, self.block_pool, self.max_model_len)
        for request in running:
            self._tables.check_invariants(request)
        block_tables = [table for request in running for table in self._tables.tables_of(request)]
        self.block_pool.check_invariants([*block_tables, *self._loads.block_tables()])
        self._prefix_cache.check_invariants(running)

    def _chunk(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, prompt_rows: PromptRowBudget
    ) -> int:
        """Return how many of ``num_new_tokens`` of ``request`` the step computes; 0 if it must wait."""
        num_new_tokens = prompt_rows.limit(request, num_new_tokens)
        if request.images:
            num_new_tokens = uncut_chunk(request.images, num_computed_tokens, num_new_tokens)
        return self._chunking.limit(request, num_computed_tokens, num_new_tokens)

    def _finish_in_step(self, request: Request, status: RequestStatus) -> None:
        """Finish a request from any queue. Running ones leave their queue together, at the end of the step."""
        if request.status is RequestStatus.PREEMPTED:
            self._waiting.remove(request)
        self._finish(request, status)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        request.move_to(status)
        self._placement.release(request)
        self._loads.forget(request.request_id)
        del self._requests[request.request_id]
