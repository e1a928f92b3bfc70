"""An engine in virtual time, with its prefix cache.

It claims as ``ClaimLoop`` of worker/serving/claiming.py does, and computes at its speed.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable

import simpy

from ...shared.broker import LEASE_TTL_MS, Claim
from .claiming import Claims
from .measures import Loss, Note
from .running import Running, capacity_of, next_prompt_tokens, step_work
from .scenario import Engines
from .world import Partition, Process, World

# As LEASE_RENEWALS_PER_TTL of worker/serving.
RENEW_EVERY_S = LEASE_TTL_MS / 1000 / 3
# Default of --block-size: only whole blocks match.
BLOCK_TOKENS = 16


class Engine:
    """An engine that runs until ``die``, or until ``drain`` and the end of its requests. Then it calls ``on_left``.

    Args:
        on_ended: called with each finished request, after Redis has recorded its end.
    """

    def __init__(
        self,
        world: World,
        engine_id: str,
        kind: Engines,
        on_left: Callable[[Engine], None],
        on_ended: Callable[[Note], None],
    ) -> None:
        self.engine_id = engine_id
        self.kind = kind
        self.is_alive = True
        self.running: dict[str, Running] = {}
        self.claims = Claims(world, engine_id, kind, self.running, self._admit)
        self._unsent: dict[int, list[Running]] = defaultdict(list)
        self._cache = PrefixCache()
        self._world = world
        self._on_left = on_left
        self._on_ended = on_ended
        self._env = world.env
        self._arrival = self._env.event()
        self._appended_s = self._env.now
        self._is_falling_asleep = False
        self._left = self._env.event()
        self._env.process(self.claims.run())
        self._env.process(self._compute_forever())
        for number in range(len(world.partitions)):
            self._env.process(self._renew_forever(number))

    @property
    def is_claiming(self) -> bool:
        return self.claims.is_claiming

    def has_room_for(self, note: Note) -> bool:
        """Return whether the engine could take a request, regardless of quotas and with its maximum output."""
        room = capacity_of(self.kind, self.running.values())
        free_seqs = room.max_num_seqs - room.num_kept_seqs - room.num_seqs
        if not self.is_claiming or self.claims.max_new is not None or free_seqs < 1 or self._has_probationer():
            return False
        most_tokens = room.num_held_kv_tokens + note.num_prompt + note.most_tokens
        return not self.running or most_tokens <= room.num_kv_tokens

    def die(self, loss: Loss) -> None:
        """Disappear immediately. Unlogged tokens are lost; only Redis knows the requests of the engine."""
        self.is_alive = False
        unsent = [one for ended in self._unsent.values() for one in ended]
        for running in (*self.running.values(), *unsent):
            self._world.measures.record_requeue(running.note, self._env.now, loss)
        self.running.clear()
        self._unsent.clear()
        self._stop_claiming()

    def drain(self) -> None:
        """Stop claiming, and leave after the last request."""
        self.claims.withdraw(self.claims.seats)
        self._stop_claiming()

    def sleep(self) -> simpy.Event:
        """Return the requests to the queue after the current step, then leave. Return the event of that."""
        self._is_falling_asleep = True
        self.drain()
        return self._left

    def _stop_claiming(self) -> None:
        self.claims.stop()
        if not self._arrival.triggered:
            self._arrival.succeed()

    def _has_probationer(self) -> bool:
        return any(one.is_on_probation for one in self.running.values())

    def _admit(self, claim: Claim, partition: Partition) -> None:
        note = self._world.measures.record_claim(claim.request_id, self._env.now)
        count = claim.num_logged_tokens
        num_found = self._cache.take(note) if note.session else 0
        note.num_found = max(note.num_found, num_found)
        if claim.attempt > 1:
            self._world.measures.num_recomputed += note.num_prompt + count - num_found
        self.running[claim.request_id] = Running(
            note,
            claim.epoch,
            note.num_prompt + count - num_found,
            count,
            count,
            claim.num_kv_tokens,
            claim.alone_until,
            partition.number,
        )
        self._make_room()
        if not self._arrival.triggered:
            self._arrival.succeed()

    def _make_room(self) -> None:
        self._cache.shrink(self.kind.kv_tokens - sum(one.num_context for one in self.running.values()))

    def _compute_forever(self) -> Process:
        while self.is_alive and (self.is_claiming or self.running):
            self._arrival = self._env.event()
            if not self.running:
                self._appended_s = self._env.now
                yield self._arrival
                continue
            self._world.num_computing += 1
            reading = next_prompt_tokens(self.kind, self.running.values())
            decoding = [one for one in self.running.values() if one.is_decoding]
            step_s = self._step_s(reading, decoding)
            num_steps = 1 if reading else self._span(decoding, step_s)
            step_s = self._step_s(reading, decoding, num_steps)
            started_s = self._env.now
            yield self._env.timeout(num_steps * step_s) | self._arrival
            left_s = num_steps * step_s - (self._env.now - started_s)
            if left_s > 1e-9 and self.is_alive:
                # A request joins, so the current step is the last of this span.
                num_steps = min(num_steps, math.floor((self._env.now - started_s) / step_s + 1e-9) + 1)
                yield self._env.timeout(max(0.0, started_s + num_steps * step_s - self._env.now))
            self._world.num_computing -= 1
            if self.is_alive:
                self._settle(reading, decoding, num_steps)
                if self._is_falling_asleep:
                    self._return_requests()
        for partition in self._world.partitions:
            yield from partition.redis()
        if self.is_alive:
            self._on_left(self)
            self._left.succeed()

    def _step_s(self, reading: list[tuple[Running, int]], decoding: list[Running], num_steps: int = 1) -> float:
        return self.kind.step_s(step_work(reading, decoding, num_steps), self._world.num_computing)

    def _span(self, decoding: list[Running], step_s: float) -> int:
        """Return the number of steps until a request ends or its tokens must be appended."""
        to_append = math.ceil((self._appended_s + self.kind.append_every_s - self._env.now) / step_s)
        return max(1, min(to_append, min(one.note.num_output - one.num_made for one in decoding)))

    def _settle(self, reading: list[tuple[Running, int]], decoding: list[Running], num_steps: int) -> None:
        """Record the results of the last steps, and send ends and due appends."""
        measures, now = self._world.measures, self._env.now
        was_on_probation = self._has_probationer()
        for one in decoding:
            one.num_made += num_steps
            measures.record_tokens(one.note, num_steps)
            if one.note.lost_s is not None:
                measures.record_output(one.note, now)
        for one, num_tokens in reading:
            one.num_left -= num_tokens
            measures.record_tokens(one.note, num_tokens)
            if not one.num_left:
                one.num_made += 1
                measures.record_tokens(one.note, 1)
                measures.record_output(one.note, now)
        self._end_requests([one for one in self.running.values() if one.num_made >= one.note.num_output])
        if now - self._appended_s >= self.kind.append_every_s:
            self._append()
        if was_on_probation and not self._has_probationer():
            self.claims.wake(cause="end")

    def _end_requests(self, ended: list[Running]) -> None:
        if not ended:
            return
        for one in ended:
            del self.running[one.note.request_id]
            self._cache.keep(one.note)
        self._make_room()
        for partition, own in self._by_partition(ended):
            unsent = self._unsent[partition.number]
            unsent += own
            if not partition.is_away:
                self._send_ends(partition)
            elif len(unsent) == len(own):
                self._env.process(self._send_ends_later(partition))

    def _by_partition(self, several: list[Running]) -> list[tuple[Partition, list[Running]]]:
        by_partition: dict[int, list[Running]] = defaultdict(list)
        for one in several:
            by_partition[one.partition].append(one)
        return [(self._world.partitions[number], own) for number, own in by_partition.items()]

    def _send_ends(self, partition: Partition) -> None:
        ended = self._unsent.pop(partition.number)
        for one in ended:
            one.note.ended_s = self._env.now
        stale = partition.do(partition.broker.finish([one.final_record() for one in ended]))
        self._world.measures.num_stale += len(stale)
        self.claims.wake(cause="end")
        for one in ended:
            self._on_ended(one.note)

    def _send_ends_later(self, partition: Partition) -> Process:
        yield from partition.redis()
        if self.is_alive:
            self._send_ends(partition)

    def _return_requests(self) -> None:
        self._append()
        for partition, own in self._by_partition(list(self.running.values())):
            partition.do(partition.broker.release([(one.note.request_id, one.epoch) for one in own]))
            for one in own:
                self._world.measures.record_requeue(one.note, self._env.now, None)
        self.running.clear()

    def _append(self) -> None:
        self._appended_s = self._env.now
        unlogged = [one for one in self.running.values() if one.num_made > one.num_logged]
        for partition, own in self._by_partition(unlogged):
            if partition.is_away:
                continue  # the next one has it
            records = [one.record() for one in own]
            self._drop(partition.do(partition.broker.append(records)))
            for one in own:
                one.num_logged = one.num_made

    def _renew_forever(self, number: int) -> Process:
        partition, seat = self._world.partitions[number], self.claims.seats[number]
        while True:
            yield self._env.timeout(RENEW_EVERY_S)
            yield from partition.redis()
            if not (self.is_alive and (self.is_claiming or self.running)):
                return
            claims = [(one.note.request_id, one.epoch) for one in self.running.values() if one.partition == number]
            if claims or self._env.now - seat.claimed_s > 2 * RENEW_EVERY_S:
                self._drop(partition.do(partition.broker.renew(self.engine_id, claims)))

    def _drop(self, stale: list[str]) -> None:
        """Drop requests that Redis refuses as claimed by another engine. The simulation counts them as a fault."""
        self._world.measures.num_stale += len(stale)
        for request_id in stale:
            running = self.running.pop(request_id, None)
            if running:
                self._world.measures.record_requeue(running.note, self._env.now, None)


class PrefixCache:
    """Cached tokens by session. The least recently used session is evicted first."""

    def __init__(self) -> None:
        self._cached: OrderedDict[str, int] = OrderedDict()

    def take(self, note: Note) -> int:
        """Remove a session and return the cached tokens of a prompt. Its last token is always computed."""
        num_cached = self._cached.pop(note.session, 0)
        return min(num_cached, note.num_prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    def keep(self, note: Note) -> None:
        """Keep the computed tokens of a turn that has ended."""
        if note.session:
            self._cached[note.session] = note.num_prompt + note.num_output

    def shrink(self, num_tokens: int) -> None:
        """Evict sessions until at most ``num_tokens`` are cached."""
        total = sum(self._cached.values())
        while self._cached and total > num_tokens:
            total -= self._cached.popitem(last=False)[1]
