"""Random histories of requests that come and are claimed, against the model of ``expected.py``."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule

from penstock.shared.broker import NEW, UNSERVED, Broker, Claim, DeadLetter, Queue
from penstock.shared.errors import ModelBrokenError, RequestConflictError
from penstock.shared.keys import Keys
from penstock.shared.queue.lifecycle import RequestState
from penstock.shared.queue.policy import MAX_AFFINITY_MS, Order, QueuePolicy, TenantPolicy
from penstock.shared.shards import make_pair

from ..conftest import TTL_MS, take
from ..snapshot import forget
from .expected import BANDS, MAX_CONCURRENT, TENANTS, ExpectedQueue, ExpectedRequest, ExpectedRoom

T = TypeVar("T")
LEASE_MS = 600_000
ENGINES = ("e0", "e1", "e2")
CLIENTS = ("", "c0", "c1")
# By the server's clock, and far from it.
FIRST_DEADLINE_MS = 4_000_000_000_000
NUMBERS = st.integers(0, 19)
# Of a conversation, and which: what came before it is known if an engine was given that.
Turn = tuple[str, int] | None
TURNS: st.SearchStrategy[Turn] = st.none() | st.tuples(st.sampled_from("ab"), st.integers(1, 3))


def digests_of(tenant: str, turn: Turn) -> tuple[str, ...]:
    """Return the digests of a turn and those before it, the longest first."""
    return () if turn is None else tuple(f"{tenant}-{turn[0]}-{number}" for number in range(turn[1], 0, -1))


@dataclass(frozen=True)
class Holding:
    """A request as its engine believes it to be, which may be stale."""

    request_id: str
    epoch: int
    engine: str


class ClaimMachine(RuleBasedStateMachine):
    """Requests come, of conversations or not, and engines claim them."""

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

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    @initialize(order=st.sampled_from(Order), is_patient=st.booleans())
    def configure(self, order: Order, is_patient: bool) -> None:
        self.expected.order, self.expected.is_patient = order, is_patient
        self.do(self.queue.configure(QueuePolicy(order=order, affinity_ms=MAX_AFFINITY_MS if is_patient else 0)))
        narrow = TenantPolicy(max_concurrent_requests=MAX_CONCURRENT)
        self.do(self.queue.configure_tenant(TENANTS[-1], narrow))

    @rule(
        number=NUMBERS,
        client=st.sampled_from(CLIENTS),
        fail_fast=st.booleans(),
        tenant=st.sampled_from(TENANTS),
        band=st.sampled_from(BANDS),
        num_tokens=st.tuples(st.integers(0, 9), st.integers(1, 9)),
        deadline=st.none() | st.integers(1, 5),
        turn=TURNS,
    )
    def enqueue(self, number, client, fail_fast, tenant, band, num_tokens, deadline, turn=None) -> None:
        request_id = f"r{number}"
        known = self.expected.requests.get(request_id)
        deadline_ms = None if deadline is None else FIRST_DEADLINE_MS + deadline
        digests = digests_of(tenant, turn)
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
            digests=digests,
            own_digests=digests[:1],
        )
        reply = self.enqueued(work, known, tenant)
        if known is not None or self.expected.is_given_up:
            return
        if fail_fast and not self.expected.is_served:
            assert reply == UNSERVED
        else:
            assert reply == NEW
            request = ExpectedRequest(client, fail_fast, tenant, band, sum(num_tokens), deadline_ms)
            request.own_digests, request.warm = digests[:1], self.expected.mark(digests)
            self.expected.add(request_id, request)

    def enqueued(self, work: Coroutine[Any, Any, str], known: ExpectedRequest | None, tenant: str) -> str:
        """Enqueue, and look at the answer where the id is known: a state, or a refusal of another tenant.

        A model that every device has given up takes no new request.
        """
        if known is None and self.expected.is_given_up:
            with pytest.raises(ModelBrokenError):
                self.do(work)
            return ""
        if known is not None and known.tenant != tenant:
            with pytest.raises(RequestConflictError, match="another tenant"):
                self.do(work)
            return known.state
        reply = self.do(work)
        assert known is None or reply == known.state
        return reply

    @rule(
        target=holdings,
        requests=st.lists(
            st.tuples(NUMBERS, st.sampled_from(TENANTS), st.sampled_from(BANDS), TURNS), min_size=2, max_size=6
        ),
        engine=st.sampled_from(ENGINES),
        limit=st.integers(1, 5),
    )
    def burst(self, requests: list[tuple[int, str, str, Turn]], engine: str, limit: int) -> Holding:
        """Much comes at once and is taken, or a part of it: most of what can go wrong needs some of both."""
        if self.expected.is_paused:
            self.resume()
        for number, tenant, band, turn in requests:
            self.enqueue(number, "", False, tenant, band, (number, 1), number % 3 or None, turn)
        return self.claim_some(engine, limit)

    @rule(target=holdings, engine=st.sampled_from(ENGINES), limit=st.integers(1, 3))
    def claim(self, engine: str, limit: int) -> Holding:
        return self.claim_some(engine, limit)

    def claim_some(self, engine: str, limit: int) -> Holding:
        held = self.expected.held_by(engine)
        if not self.expected.is_paused:
            self.expected.expire(running_too=False)
            held = self.expected.held_by(engine)
        ward = (self.do(self.connection.execute("GET", self.broker.keys.prefix + "ward")) or b"").decode()
        is_claimable = self.expected.claimable(engine, limit, ward)
        wave = self.do(take(self.broker, engine, limit, num_held=len(held), lease_ttl_ms=LEASE_MS))
        self.expected.leases.add(engine)
        if not wave:
            assert held or not is_claimable
        assert not (wave and self.expected.is_paused)
        if any(claim.alone_until >= 0 for claim in wave):
            assert len(wave) == 1
            assert not held
        num_again = sum(claim.attempt > 1 for claim in wave)
        room = ExpectedRoom(len(held) + limit, len(held) + num_again)
        is_left: Callable[[str], bool] | None = None
        for claim in wave:
            if claim.attempt == 1:
                is_left = is_left or self.expected.left_to_others(engine, room, ward)
                self.check_turn(claim.request_id, engine, is_left)
            self.check_claim(claim, engine)
        self.note_room(engine, wave, limit, len(held))
        return self.some_holding(engine)

    def note_room(self, engine: str, wave: list[Claim], limit: int, num_held: int) -> None:
        if self.expected.is_paused:
            return  # it is as it was
        self.expected.rooms[engine] = ExpectedRoom(num_held + limit, num_held + len(wave))
        ward = self.do(self.connection.execute("GET", self.broker.keys.prefix + "ward"))
        is_apart = ward == engine.encode() or any(claim.alone_until >= 0 for claim in wave)
        if len(wave) < limit and not is_apart:
            self.expected.vacant.add(engine)
        else:
            self.expected.vacant.discard(engine)

    def check_turn(self, request_id: str, engine: str, is_left: Callable[[str], bool]) -> None:
        """It is the first of its lane, or the engine's own not far behind; no higher band has a lane to claim from that
        is not left to another engine, nor is it itself; and its tenant is within its quota.
        """
        request = self.expected.requests[request_id]
        lanes = self.expected.lanes()
        lane = lanes[request.lane]
        assert request_id in (self.expected.first_in(lane), *self.expected.own_in(lane, engine))
        assert not is_left(request_id)
        assert self.expected.may_start(request.tenant)
        for name, lane in lanes.items():
            band, _, tenant = name.partition(":")
            is_higher = BANDS.index(band) < BANDS.index(request.band) and self.expected.may_start(tenant)
            assert not is_higher or is_left(self.expected.first_in(lane))

    def check_claim(self, claim: Claim, engine: str) -> None:
        request = self.expected.requests[claim.request_id]
        assert request.state is RequestState.QUEUED
        assert claim.epoch not in self.epochs[claim.request_id]
        self.epochs[claim.request_id].add(claim.epoch)
        request.claimed_by(engine, claim.epoch)
        self.expected.warm.update(dict.fromkeys(request.own_digests, engine))
        assert (claim.payload, claim.attempt) == (b"p", request.attempts)
        assert claim.num_logged_tokens == len(request.tokens)
        assert (claim.expires_in_ms >= 0) == (request.deadline is not None)

    def some_holding(self, engine: str) -> Holding:
        """Choose a request that the engine holds, or one that never was."""
        held = self.expected.held_by(engine)
        if held:
            request_id = max(held)
            return Holding(request_id, held[request_id].epoch, engine)
        self.enqueue(0, "", False, "t0", "standard", (1, 1), None)
        return Holding("r0", -1, engine)

    @rule()
    def resume(self) -> None:
        assert self.do(self.queue.resume()) == self.expected.is_paused
        self.expected.is_paused = False

    def teardown(self) -> None:
        self.do(forget(self.connection, self.broker.keys))
        self.do(self.connection.close())
        self.loop.close()
