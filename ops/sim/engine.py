"""An engine under virtual time: claims as ``ClaimLoop`` of worker/serving/claiming.py does, and computes by its speed.

While no prompt is being read and nobody joins, steps differ in nothing, so they are taken as one span up to the next
end or append. What joins waits for the end of the step under way.

Not simulated: preemption (a claim reckons the cache so that it is hardly ever over-full), prefix caching, stalls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ...shared.broker import LEASE_TTL_MS, SEQS_PER_KEPT_ONE, Claim, FinalRecord, Record, Room, Wave
from ...shared.messages import Delta, FinishReason, Usage
from .measures import Loss, Note
from .scenario import Engines
from .speed import StepWork
from .world import Process, World

# As LEASE_RENEWALS_PER_TTL of worker/serving.
RENEW_EVERY_S = LEASE_TTL_MS / 1000 / 3


@dataclass(slots=True)
class Running:
    """A request that an engine holds. ``num_left`` tokens of prompt are to be read, of a former engine's output too."""

    note: Note
    epoch: int
    num_left: int
    num_made: int
    num_logged: int
    num_kv_tokens: int
    alone_until: int

    @property
    def is_decoding(self) -> bool:
        return self.num_left == 0

    @property
    def num_context(self) -> int:
        """Tokens in the cache."""
        return max(0, self.note.num_prompt + self.num_made - self.num_left)

    def unlogged(self) -> Delta:
        """What was made since the last append."""
        return Delta(index=self.num_logged, token_ids=[0] * (self.num_made - self.num_logged))

    def record(self) -> Record:
        """What an append says of it."""
        return Record(self.note.request_id, self.epoch, self.unlogged())

    def final_record(self) -> FinalRecord:
        """What its end says."""
        last = self.unlogged()
        last.finish_reason, last.usage = FinishReason.LENGTH, Usage(self.note.num_prompt, self.num_made)
        return FinalRecord(self.note.request_id, self.epoch, last)


def room_of(kind: Engines, running: Collection[Running]) -> Room:
    """What an engine that holds these says in a claim."""
    return Room(
        max_num_seqs=kind.max_num_seqs,
        num_seqs=len(running),
        num_kv_tokens=kind.kv_tokens,
        num_held_kv_tokens=sum(one.num_kv_tokens for one in running),
        num_kept_seqs=kind.max_num_seqs // SEQS_PER_KEPT_ONE,
    )


def next_prompt_tokens(kind: Engines, running: Collection[Running]) -> list[tuple[Running, int]]:
    """What the next step reads of prompts, the oldest first."""
    budget = kind.max_step_tokens - sum(one.is_decoding for one in running)
    reading: list[tuple[Running, int]] = []
    for one in running:
        if one.num_left and budget > 0:
            reading.append((one, min(one.num_left, budget)))
            budget -= reading[-1][1]
    return reading


def step_work(reading: list[tuple[Running, int]], decoding: list[Running], num_steps: int = 1) -> StepWork:
    """What a step has to do, in the middle of so many."""
    return StepWork(
        num_decoding=len(decoding),
        num_context_tokens=sum(one.num_context for one in decoding) + len(decoding) * (num_steps - 1) / 2,
        num_prompt_tokens=sum(num_tokens for _, num_tokens in reading),
        num_prompt_pairs=sum(num_tokens * (one.num_context + num_tokens // 2) for one, num_tokens in reading),
    )


class Engine:
    """Runs from its making until ``die``, or ``drain`` and the end of what it holds: then ``on_left`` is told."""

    def __init__(self, world: World, engine_id: str, kind: Engines, on_left: Callable[[Engine], None]) -> None:
        self.engine_id = engine_id
        self.kind = kind
        self.is_alive = True
        self.is_claiming = True
        self.running: dict[str, Running] = {}
        self._unsent: list[Running] = []
        self._world = world
        self._on_left = on_left
        self._env = world.env
        self._wake = self._env.event()
        self._woken_by = "start"
        self._arrival = self._env.event()
        self._claimed_s = self._appended_s = self._env.now
        for process in (self._claim_forever(), self._compute_forever(), self._renew_forever()):
            self._env.process(process)

    def has_room_for(self, note: Note) -> bool:
        """Whether it could take a request, whatever its tenant holds and however much of its output it makes."""
        room = room_of(self.kind, self.running.values())
        free_seqs = room.max_num_seqs - room.num_kept_seqs - room.num_seqs
        if not self.is_claiming or free_seqs < 1 or self._has_probationer():
            return False
        most_tokens = room.num_held_kv_tokens + note.num_prompt + note.most_tokens
        return not self.running or most_tokens <= room.num_kv_tokens

    def wake(self, cause: str = "wake") -> None:
        """Look again: something came, or there is more room."""
        if not self._wake.triggered:
            self._woken_by = cause
            self._wake.succeed()

    def die(self, loss: Loss) -> None:
        """Be gone at once; what was not logged is lost. What it held is known to Redis alone."""
        self.is_alive = self.is_claiming = False
        for running in (*self.running.values(), *self._unsent):
            self._world.measures.note_put_back(running.note, self._env.now, loss)
        self.running, self._unsent = {}, []
        self._stop_waiting()

    def drain(self) -> None:
        """Claim nothing more, and end with the last request."""
        self.is_claiming = False
        self._world.do(self._world.broker.withdraw(self.engine_id))
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        for event in (self._wake, self._arrival):
            if not event.triggered:
                event.succeed()

    def _has_probationer(self) -> bool:
        return any(one.num_made < one.alone_until for one in self.running.values())

    def _claim_forever(self) -> Process:
        cause = "start"
        while self.is_claiming:
            self._wake = self._env.event()
            yield self._env.timeout(self._world.round_trip_s)
            yield from self._world.redis()
            if not self.is_claiming:
                return
            wave = self._claim(cause)
            for claim in wave.claims:
                self._admit(claim)
            yield self._wake | self._env.timeout(wave.wait_s)
            cause = self._woken_by if self._wake.triggered else "idle" if wave.retry_ms < 0 else "retry"

    def _claim(self, cause: str) -> Wave:
        if len(self.running) >= self.kind.max_num_seqs or self._has_probationer():
            return Wave([])
        wave = self._world.do(self._world.broker.claim(self.engine_id, room_of(self.kind, self.running.values())))
        self._claimed_s = self._env.now
        measures = self._world.measures
        measures.num_claims[cause] += 1
        if not wave.claims:
            measures.num_wasted[cause] += 1
        return wave

    def _admit(self, claim: Claim) -> None:
        note = self._world.measures.note_claim(claim.request_id, self._env.now)
        count = claim.num_logged_tokens
        self.running[claim.request_id] = Running(
            note, claim.epoch, note.num_prompt + count, count, count, claim.num_kv_tokens, claim.alone_until
        )
        if not self._arrival.triggered:
            self._arrival.succeed()

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
                # Somebody joins: the step under way is the last of this span.
                num_steps = min(num_steps, math.floor((self._env.now - started_s) / step_s + 1e-9) + 1)
                yield self._env.timeout(max(0.0, started_s + num_steps * step_s - self._env.now))
            self._world.num_computing -= 1
            if self.is_alive:
                self._settle(reading, decoding, num_steps)
        yield from self._world.redis()
        if self.is_alive:
            self._on_left(self)

    def _step_s(self, reading: list[tuple[Running, int]], decoding: list[Running], num_steps: int = 1) -> float:
        return self.kind.step_s(step_work(reading, decoding, num_steps), self._world.num_computing)

    def _span(self, decoding: list[Running], step_s: float) -> int:
        """Steps until a request ends or its tokens are to be appended."""
        to_append = math.ceil((self._appended_s + self.kind.append_every_s - self._env.now) / step_s)
        return max(1, min(to_append, min(one.note.num_output - one.num_made for one in decoding)))

    def _settle(self, reading: list[tuple[Running, int]], decoding: list[Running], num_steps: int) -> None:
        """Note what the last steps have made, and send what ended or is due."""
        measures, now = self._world.measures, self._env.now
        was_on_probation = self._has_probationer()
        for one in decoding:
            one.num_made += num_steps
            measures.note_tokens(one.note, num_steps)
            if one.note.lost_s is not None:
                measures.note_output(one.note, now)
        for one, num_tokens in reading:
            one.num_left -= num_tokens
            measures.note_tokens(one.note, num_tokens)
            if not one.num_left:
                one.num_made += 1
                measures.note_tokens(one.note, 1)
                measures.note_output(one.note, now)
        self._end([one for one in self.running.values() if one.num_made >= one.note.num_output])
        if now - self._appended_s >= self.kind.append_every_s:
            self._append()
        if was_on_probation and not self._has_probationer():
            self.wake("end")

    def _end(self, ended: list[Running]) -> None:
        if not ended:
            return
        for one in ended:
            del self.running[one.note.request_id]
        self._unsent += ended
        if not self._world.is_away:
            self._send_ends()
        elif len(self._unsent) == len(ended):
            self._env.process(self._send_ends_later())

    def _send_ends(self) -> None:
        ended, self._unsent = self._unsent, []
        for one in ended:
            one.note.ended_s = self._env.now
        stale = self._world.do(self._world.broker.finish([one.final_record() for one in ended]))
        self._world.measures.num_stale += len(stale)
        self.wake("end")

    def _send_ends_later(self) -> Process:
        yield from self._world.redis()
        if self.is_alive:
            self._send_ends()

    def _append(self) -> None:
        self._appended_s = self._env.now
        if self._world.is_away:
            return  # the next one has it
        behind = [one for one in self.running.values() if one.num_made > one.num_logged]
        if not behind:
            return
        records = [one.record() for one in behind]
        self._drop(self._world.do(self._world.broker.append(records)))
        for one in behind:
            one.num_logged = one.num_made

    def _renew_forever(self) -> Process:
        while True:
            yield self._env.timeout(RENEW_EVERY_S)
            yield from self._world.redis()
            if not (self.is_alive and (self.is_claiming or self.running)):
                return
            if self.running or self._env.now - self._claimed_s > 2 * RENEW_EVERY_S:
                claims = [(one.note.request_id, one.epoch) for one in self.running.values()]
                self._drop(self._world.do(self._world.broker.renew(self.engine_id, claims)))

    def _drop(self, stale: list[str]) -> None:
        """Redis says that these are somebody else's, though this engine lives: a simulation counts them as a fault."""
        self._world.measures.num_stale += len(stale)
        for request_id in stale:
            running = self.running.pop(request_id, None)
            if running:
                self._world.measures.note_put_back(running.note, self._env.now, None)
