"""Random histories of engines against the model of ``expected.py``; ``test_contract.py`` has what else may happen."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import defaultdict
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, rule

from penstock.shared.broker import NEW, UNSERVED, Broker, Claim, DeadLetter, FinalRecord, Queue, Record
from penstock.shared.keys import Keys
from penstock.shared.messages import Delta, FinishReason
from penstock.shared.policy import Order, QueuePolicy, TenantPolicy
from penstock.shared.request_state import RequestState
from penstock.shared.shards import make_pair

from .conftest import CAUSE, TTL_MS, take
from .expected import BANDS, MAX_CONCURRENT, TENANTS, ExpectedQueue, ExpectedRequest
from .snapshot import forget

LEASE_MS = 600_000
MAX_DELIVERIES = 2
ENGINES = ("e0", "e1", "e2")
CLIENTS = ("", "c0", "c1")
# By the server's clock, and far from it.
FIRST_DEADLINE_MS = 4_000_000_000_000
NUMBERS = st.integers(0, 19)
# What an engine may still hold that Redis has forgotten.
NOBODYS = ExpectedRequest("", False, "", "", 0, None)


@dataclass(frozen=True)
class Holding:
    """What an engine believes: it may be stale."""

    request_id: str
    epoch: int
    engine: str


class EngineMachine(RuleBasedStateMachine):
    """Requests come, and engines do with them what they may do, or die."""

    url: str
    holdings: Bundle[Holding] = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.connection, _ = make_pair(self.url)
        self.broker = Broker(self.connection, Keys(f"test-{uuid.uuid4().hex}").model("m"))
        self.queue = Queue(self.connection, self.broker.keys)
        self.dead_letter = DeadLetter(self.connection, self.broker.keys)
        self.expected = ExpectedQueue("fcfs")
        self.token = itertools.count()
        # Of each request, whatever Redis has forgotten since: no two owners may have one.
        self.epochs: dict[str, set[int]] = defaultdict(set)

    def do(self, work):
        return self.loop.run_until_complete(work)

    @initialize(order=st.sampled_from(Order))
    def configure(self, order: Order) -> None:
        self.expected.order = order
        self.do(self.queue.configure(QueuePolicy(order=order)))
        narrow = TenantPolicy(max_concurrent_requests=MAX_CONCURRENT)
        self.do(self.queue.configure_tenant(TENANTS[-1], narrow))

    def holds(self, holding: Holding) -> bool:
        request = self.expected.requests.get(holding.request_id)  # gone if Redis has forgotten it
        return request is not None and request.state is RequestState.CLAIMED and request.epoch == holding.epoch

    def refused(self, holding: Holding) -> list[str]:
        return [] if self.holds(holding) else [holding.request_id]

    @rule(
        number=NUMBERS,
        client=st.sampled_from(CLIENTS),
        fail_fast=st.booleans(),
        tenant=st.sampled_from(TENANTS),
        band=st.sampled_from(BANDS),
        num_tokens=st.tuples(st.integers(0, 9), st.integers(1, 9)),
        deadline=st.none() | st.integers(1, 5),
    )
    def enqueue(self, number, client, fail_fast, tenant, band, num_tokens, deadline) -> None:
        request_id = f"r{number}"
        known = self.expected.requests.get(request_id)
        deadline_ms = None if deadline is None else FIRST_DEADLINE_MS + deadline
        work = self.broker.enqueue(
            request_id,
            b"p",
            result_ttl_ms=TTL_MS,
            client_id=client,
            client_ttl_ms=LEASE_MS,
            fail_fast=fail_fast,
            tenant=tenant,
            band=band,
            num_prompt_tokens=num_tokens[0],
            max_tokens=num_tokens[1],
            deadline_ms=deadline_ms,
        )
        reply = self.do(work)
        if known is not None:
            assert reply == known.state
        elif fail_fast and not self.expected.leases:
            assert reply == UNSERVED
        else:
            assert reply == NEW
            request = ExpectedRequest(client, fail_fast, tenant, band, sum(num_tokens), deadline_ms)
            self.expected.add(request_id, request)

    @rule(
        target=holdings,
        requests=st.lists(st.tuples(NUMBERS, st.sampled_from(TENANTS), st.sampled_from(BANDS)), min_size=2, max_size=6),
        engine=st.sampled_from(ENGINES),
        limit=st.integers(1, 5),
    )
    def burst(self, requests: list[tuple[int, str, str]], engine: str, limit: int) -> Holding:
        """Much comes at once and is taken, or a part of it: most of what can go wrong needs some of both."""
        if self.expected.is_paused:
            self.resume()
        for number, tenant, band in requests:
            self.enqueue(number, "", False, tenant, band, (number, 1), number % 3 or None)
        return self.claim_some(engine, limit)

    @rule(target=holdings, engine=st.sampled_from(ENGINES), limit=st.integers(1, 3))
    def claim(self, engine: str, limit: int) -> Holding:
        return self.claim_some(engine, limit)

    def claim_some(self, engine: str, limit: int) -> Holding:
        held = self.expected.held_by(engine)
        if not self.expected.is_paused:
            self.expected.expire(running_too=False)
            held = self.expected.held_by(engine)
        wave = self.do(take(self.broker, engine, limit, num_held=len(held), lease_ttl_ms=LEASE_MS))
        self.expected.leases.add(engine)
        self.note_vacancy(engine, wave, limit)
        if not wave:
            assert held or not self.expected.claimable()
        assert not (wave and self.expected.is_paused)
        if any(claim.alone_until >= 0 for claim in wave):
            assert len(wave) == 1
            assert not held
        for claim in wave:
            if claim.attempt == 1:
                self.check_turn(claim.request_id)
            self.check_claim(claim, engine)
        return self.some_holding(engine)

    def note_vacancy(self, engine: str, wave: list[Claim], limit: int) -> None:
        if self.expected.is_paused:
            return  # it is as it was
        ward = self.do(self.connection.execute("GET", self.broker.keys.prefix + "ward"))
        is_apart = ward == engine.encode() or any(claim.alone_until >= 0 for claim in wave)
        if len(wave) < limit and not is_apart:
            self.expected.vacant.add(engine)
        else:
            self.expected.vacant.discard(engine)

    def check_turn(self, request_id: str) -> None:
        """It is the first of its lane, no higher band has a lane to claim from, and its tenant is within its quota."""
        request = self.expected.requests[request_id]
        lanes = self.expected.lanes()
        assert self.expected.first_in(lanes[request.lane]) == request_id
        assert self.expected.may_start(request.tenant)
        for lane in lanes:
            band, _, tenant = lane.partition(":")
            assert BANDS.index(band) >= BANDS.index(request.band) or not self.expected.may_start(tenant)

    def check_claim(self, claim: Claim, engine: str) -> None:
        request = self.expected.requests[claim.request_id]
        assert request.state is RequestState.QUEUED
        assert claim.epoch not in self.epochs[claim.request_id]
        self.epochs[claim.request_id].add(claim.epoch)
        request.claimed_by(engine, claim.epoch)
        assert (claim.payload, claim.attempt) == (b"p", request.attempts)
        assert claim.num_logged_tokens == len(request.tokens)
        assert (claim.expires_in_ms >= 0) == (request.deadline is not None)

    def some_holding(self, engine: str) -> Holding:
        """Of what the engine holds, or one that never was."""
        held = self.expected.held_by(engine)
        if held:
            request_id = max(held)
            return Holding(request_id, held[request_id].epoch, engine)
        self.enqueue(0, "", False, "t0", "standard", (1, 1), None)
        return Holding("r0", -1, engine)

    @rule(holding=holdings, num_tokens=st.integers(1, 40), times=st.integers(1, 2))
    def append(self, holding: Holding, num_tokens: int, times: int) -> None:
        request = self.expected.requests.get(holding.request_id, NOBODYS)
        tokens = [next(self.token) for _ in range(num_tokens)]
        record = Record(holding.request_id, holding.epoch, Delta(index=len(request.tokens), token_ids=tokens))
        refused = self.refused(holding)
        for _ in range(times):  # a lost reply makes the caller send it again
            assert self.do(self.broker.append([record])) == refused
        if not refused:
            request.tokens += tokens

    @rule(holding=consumes(holdings), num_tokens=st.integers(0, 2), times=st.integers(1, 2))
    def finish(self, holding: Holding, num_tokens: int, times: int) -> None:
        request = self.expected.requests.get(holding.request_id, NOBODYS)
        tokens = [next(self.token) for _ in range(num_tokens)]
        delta = Delta(index=len(request.tokens), token_ids=tokens, finish_reason=FinishReason.STOP)
        refused = self.refused(holding)
        already_ended = request.state is RequestState.FINISHED and request.epoch == holding.epoch
        for _ in range(times):
            reply = self.do(self.broker.finish([FinalRecord(holding.request_id, holding.epoch, delta)]))
            assert reply == ([] if already_ended else refused)
        if not refused:
            request.tokens += tokens
            request.end(RequestState.FINISHED)

    @rule(holding=holdings)
    def release(self, holding: Holding) -> None:
        held = self.holds(holding)
        assert self.do(self.broker.release([(holding.request_id, holding.epoch)])) == int(held)
        if held:
            self.expected.requests[holding.request_id].queue_again()

    @rule(holding=holdings)
    def renew(self, holding: Holding) -> None:
        claims = [(holding.request_id, holding.epoch)]
        assert self.do(self.broker.renew(holding.engine, claims, lease_ttl_ms=LEASE_MS)) == self.refused(holding)
        self.expected.leases.add(holding.engine)

    @rule(engine=st.sampled_from(ENGINES))
    def withdraw(self, engine: str) -> None:
        """It sleeps or drains: it claims nothing until it says otherwise."""
        self.do(self.broker.withdraw(engine))
        self.expected.vacant.discard(engine)

    @rule(holding=holdings)
    def park(self, holding: Holding) -> None:
        held = self.holds(holding)
        claim = Claim(holding.request_id, b"p", holding.epoch, 0, 1)
        assert self.do(self.broker.park(claim, CAUSE, "validation_error", "unreadable")) == held
        if held:
            self.expected.requests[holding.request_id].end_from_outside(RequestState.PARKED)

    @rule(engine=st.sampled_from(ENGINES), external=st.booleans(), by_lease=st.booleans())
    def engine_dies(self, engine: str, external: bool, by_lease: bool) -> None:
        """Its parent says so, or its lease ends and reapers find out."""
        if by_lease and engine not in self.expected.leases:
            return
        if by_lease:
            self.expected.expire(running_too=True)
        held = self.expected.held_by(engine)
        if by_lease:
            self.do(self.connection.execute("ZADD", self.broker.keys.leases, 0, engine))
            looks = [self.do(self.reap()) for _ in range(3)]
            found = [one for look in looks for one in look]
            assert [one.name for one in found] == [engine]
            num_parked = found[0].num_parked
        else:
            work = self.broker.reclaim(engine, CAUSE, is_external=external, max_deliveries=MAX_DELIVERIES)
            num_returned, num_parked = self.do(work)
            assert num_returned + num_parked == len(held)
        self.expected.leases.discard(engine)
        self.expected.vacant.discard(engine)
        for request_id, request in held.items():
            request.num_deaths += 1
            request.queue_again()
            if self.do(self.connection.execute("ZSCORE", self.broker.keys.dead, request_id)) is not None:
                assert len(held) == 1
                assert request.num_deaths >= MAX_DELIVERIES
                request.end_from_outside(RequestState.PARKED)
                num_parked -= 1
        assert num_parked == 0
        self.expected.end_unserved()

    async def reap(self):
        return await self.broker.reap(CAUSE, max_deliveries=MAX_DELIVERIES, lease_ttl_ms=0)

    @rule(put_back=st.booleans(), abort=st.booleans())
    def pause(self, put_back: bool, abort: bool) -> None:
        running = [r for r in self.expected.requests.values() if r.state is RequestState.CLAIMED]
        handed_back = [r for r in self.expected.requests.values() if r.is_returned]
        assert self.do(self.queue.pause(put_back=put_back, abort=abort)) == len(running)
        self.expected.is_paused = True
        if abort:
            for request in (*running, *handed_back):
                request.end_from_outside(RequestState.CANCELLED)
        elif put_back:
            for request in running:
                request.queue_again()

    @rule()
    def resume(self) -> None:
        assert self.do(self.queue.resume()) == self.expected.is_paused
        self.expected.is_paused = False

    def teardown(self) -> None:
        self.do(forget(self.connection, self.broker.keys))
        self.do(self.connection.close())
        self.loop.close()
