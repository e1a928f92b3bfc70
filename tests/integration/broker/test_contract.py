"""A stateful property test: random histories of many engines against a model of the contract, on a real Redis.

Contract: a request runs under one epoch at a time; only its holder writes; the log has each token once and in
order; there is exactly one end; nothing vanishes before its end, whoever dies, is cancelled, reaped or comes back late;
a request is parked only when enough engines have died on it, and the last on it alone.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from penstock.shared.broker import NEW, UNSERVED, Broker, Claim, DeadLetter, FinalRecord, Record
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import GROUP, Keys
from penstock.shared.messages import Delta, FinishReason

from .conftest import CAUSE

TTL_MS = 60_000
LEASE_MS = 600_000
MAX_DELIVERIES = 2
ENGINES = ("e0", "e1", "e2")
CLIENTS = ("", "c0", "c1")


@dataclass
class Expected:
    """What the model says of one request."""

    client: str
    fail_fast: bool
    state: str = "queued"
    epoch: int = 0
    attempts: int = 0
    num_deaths: int = 0
    engine: str = ""
    tokens: list[int] = field(default_factory=list)
    num_ends: int = 0

    @property
    def alive(self) -> bool:
        return self.state in ("queued", "claimed")

    def end(self, state: str) -> None:
        self.state, self.engine, self.num_ends = state, "", self.num_ends + 1

    def end_from_outside(self, state: str) -> None:
        self.epoch += 1
        self.end(state)


@dataclass(frozen=True)
class Holding:
    """What an engine believes: it may be stale."""

    request_id: str
    epoch: int
    engine: str


class BrokerMachine(RuleBasedStateMachine):
    url: str
    holdings: Bundle[Holding] = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.connection = CommandConnection(self.url)
        self.broker = Broker(self.connection, Keys(f"test-{uuid.uuid4().hex}").model("m"))
        self.dead_letter = DeadLetter(self.connection, self.broker.keys)
        self.expected: dict[str, Expected] = {}
        self.lane: list[str] = []  # never claimed yet, in order
        self.leases: set[str] = set()
        self.token = itertools.count()

    def do(self, work):
        return self.loop.run_until_complete(work)

    def holds(self, holding: Holding) -> bool:
        request = self.expected[holding.request_id]
        return request.state == "claimed" and request.epoch == holding.epoch

    def refused(self, holding: Holding) -> list[str]:
        return [] if self.holds(holding) else [holding.request_id]

    def held_by(self, engine: str) -> dict[str, Expected]:
        return {request_id: r for request_id, r in self.expected.items() if r.engine == engine}

    def unserved_end(self) -> None:
        if self.leases:
            return
        for request in self.expected.values():
            if request.fail_fast and request.alive:
                request.end_from_outside("failed")

    @rule(number=st.integers(0, 9), client=st.sampled_from(CLIENTS), fail_fast=st.booleans())
    def enqueue(self, number: int, client: str, fail_fast: bool) -> None:
        request_id = f"r{number}"
        known = self.expected.get(request_id)
        reply = self.do(
            self.broker.enqueue(
                request_id, b"p", result_ttl_ms=TTL_MS, client_id=client, client_ttl_ms=LEASE_MS, fail_fast=fail_fast
            )
        )
        if known is not None:
            assert reply == known.state
        elif fail_fast and not self.leases:
            assert reply == UNSERVED
        else:
            assert reply == NEW
            self.expected[request_id] = Expected(client, fail_fast)
            self.lane.append(request_id)

    @rule(target=holdings, engine=st.sampled_from(ENGINES), limit=st.integers(1, 3))
    def claim(self, engine: str, limit: int) -> Holding:
        held = self.held_by(engine)
        wave = self.do(self.broker.claim(engine, limit, num_held=len(held), lease_ttl_ms=LEASE_MS))
        self.leases.add(engine)
        if not wave:
            assert held or not any(r.state == "queued" for r in self.expected.values())
        fresh = [claim.request_id for claim in wave if claim.attempt == 1]
        assert fresh == [request_id for request_id in self.lane if self.expected[request_id].alive][: len(fresh)]
        self.lane = [request_id for request_id in self.lane if request_id not in fresh]
        if any(claim.alone_until >= 0 for claim in wave):
            assert len(wave) == 1
            assert not held
        for claim in wave:
            request = self.expected[claim.request_id]
            assert request.state == "queued"
            request.state, request.epoch, request.attempts = "claimed", request.epoch + 1, request.attempts + 1
            request.engine = engine
            assert (claim.epoch, claim.attempt) == (request.epoch, request.attempts)
            assert claim.num_logged_tokens == len(request.tokens)
        return self.some_holding(engine)

    def some_holding(self, engine: str) -> Holding:
        """Of what the engine holds, or one that never was."""
        held = self.held_by(engine)
        if held:
            request_id = max(held)
            return Holding(request_id, held[request_id].epoch, engine)
        self.enqueue(0, "", False)
        return Holding("r0", -1, engine)

    @rule(holding=holdings, num_tokens=st.integers(1, 40), times=st.integers(1, 2))
    def append(self, holding: Holding, num_tokens: int, times: int) -> None:
        request = self.expected[holding.request_id]
        tokens = [next(self.token) for _ in range(num_tokens)]
        record = Record(holding.request_id, holding.epoch, Delta(index=len(request.tokens), token_ids=tokens))
        refused = self.refused(holding)
        for _ in range(times):  # a lost reply makes the caller send it again
            assert self.do(self.broker.append([record])) == refused
        if not refused:
            request.tokens += tokens

    @rule(holding=consumes(holdings), num_tokens=st.integers(0, 2), times=st.integers(1, 2))
    def finish(self, holding: Holding, num_tokens: int, times: int) -> None:
        request = self.expected[holding.request_id]
        tokens = [next(self.token) for _ in range(num_tokens)]
        delta = Delta(index=len(request.tokens), token_ids=tokens, finish_reason=FinishReason.STOP)
        refused = self.refused(holding)
        already_ended = request.state == "finished" and request.epoch == holding.epoch
        for _ in range(times):
            reply = self.do(self.broker.finish([FinalRecord(holding.request_id, holding.epoch, delta)]))
            assert reply == ([] if already_ended else refused)
        if not refused:
            request.tokens += tokens
            request.end("finished")

    @rule(holding=holdings)
    def release(self, holding: Holding) -> None:
        held = self.holds(holding)
        assert self.do(self.broker.release([(holding.request_id, holding.epoch)])) == int(held)
        if held:
            request = self.expected[holding.request_id]
            request.state, request.engine = "queued", ""

    @rule(holding=holdings)
    def renew(self, holding: Holding) -> None:
        claims = [(holding.request_id, holding.epoch)]
        assert self.do(self.broker.renew(holding.engine, claims, lease_ttl_ms=LEASE_MS)) == self.refused(holding)
        self.leases.add(holding.engine)

    @rule(holding=holdings)
    def park(self, holding: Holding) -> None:
        held = self.holds(holding)
        claim = Claim(holding.request_id, b"p", holding.epoch, 0, 1)
        assert self.do(self.broker.park(claim, CAUSE, "validation_error", "unreadable")) == held
        if held:
            self.expected[holding.request_id].end_from_outside("parked")

    @rule(engine=st.sampled_from(ENGINES), external=st.booleans(), by_lease=st.booleans())
    def engine_dies(self, engine: str, external: bool, by_lease: bool) -> None:
        """Its parent says so, or its lease ends and reapers find out."""
        held = self.held_by(engine)
        if by_lease:
            if engine not in self.leases:
                return
            self.do(self.connection.execute("ZADD", self.broker.keys.leases, 0, engine))
            looks = [self.do(self.reap()) for _ in range(3)]
            found = [one for look in looks for one in look]
            assert [one.name for one in found] == [engine]
            num_parked = found[0].num_parked
        else:
            work = self.broker.reclaim(engine, CAUSE, is_external=external, max_deliveries=MAX_DELIVERIES)
            num_returned, num_parked = self.do(work)
            assert num_returned + num_parked == len(held)
        self.leases.discard(engine)
        for request_id, request in held.items():
            request.num_deaths += 1
            request.state, request.engine = "queued", ""
            if self.do(self.connection.execute("ZSCORE", self.broker.keys.dead, request_id)) is not None:
                assert len(held) == 1
                assert request.num_deaths >= MAX_DELIVERIES
                request.end_from_outside("parked")
                num_parked -= 1
        assert num_parked == 0
        self.unserved_end()

    async def reap(self):
        return await self.broker.reap(CAUSE, max_deliveries=MAX_DELIVERIES, lease_ttl_ms=0)

    @rule(client=st.sampled_from(CLIENTS[1:]))
    def client_vanishes(self, client: str) -> None:
        self.do(self.connection.execute("ZADD", self.broker.keys.clients, "XX", 0, client))
        for _ in range(2):
            self.do(self.reap())
        for request in self.expected.values():
            if request.client == client and request.alive:
                request.end_from_outside("cancelled")

    @rule(number=st.integers(0, 9))
    def replay(self, number: int) -> None:
        request_id = f"r{number}"
        request = self.expected.get(request_id)
        is_parked = request is not None and request.state == "parked"
        assert self.do(self.dead_letter.replay(request_id)) == is_parked
        if request is not None and is_parked:
            self.expected[request_id] = Expected("", False, epoch=request.epoch)
            self.lane.append(request_id)

    @rule(number=st.integers(0, 9))
    def cancel(self, number: int) -> None:
        request_id = f"r{number}"
        request = self.expected.get(request_id)
        reply = self.do(self.broker.cancel(request_id))
        if request is None:
            assert reply is None
            return
        if request.alive:
            request.end_from_outside("cancelled")
        assert reply == request.state

    @invariant()
    def the_log_has_each_token_once_and_at_most_one_end(self) -> None:
        for request_id, request in self.expected.items():
            log = self.do(self.broker.read_log(request_id))
            assert [token for delta in log for token in delta.token_ids] == request.tokens
            assert sum(delta.finished for delta in log) == request.num_ends <= 1
            assert not any(delta.finished for delta in log[:-1])
            assert self.do(self.broker.state(request_id)) == request.state

    @invariant()
    def the_lane_holds_what_has_not_ended(self) -> None:
        alive = [r for r in self.expected.values() if r.alive]
        assert self.do(self.connection.execute("XLEN", self.broker.keys.lane)) == len(alive)
        if any(r.attempts for r in self.expected.values()):
            pending = self.do(self.connection.execute("XPENDING", self.broker.keys.lane, GROUP))[0]
            assert pending == sum(r.attempts > 0 for r in alive)

    @invariant()
    def redis_and_the_model_agree_on_who_holds_what(self) -> None:
        for engine in ENGINES:
            held = {(request_id, r.epoch) for request_id, r in self.held_by(engine).items()}
            assert set(self.do(self.broker.claims(engine))) == held

    @invariant()
    def what_waits_stands_in_exactly_one_line(self) -> None:
        lines = [self.do(self.connection.execute("LRANGE", key, 0, -1)) for key in self.lines()]
        standing = [request_id.decode() for line in lines for request_id in line]
        waiting = [request_id for request_id, r in self.expected.items() if r.state == "queued" and r.attempts]
        for request_id in waiting:
            assert standing.count(request_id) == 1

    def lines(self) -> tuple[str, str]:
        return self.broker.keys.returned, self.broker.keys.suspects

    def teardown(self) -> None:
        self.do(self.connection.close())
        self.loop.close()


def test_random_histories_keep_the_contract(redis_url: str) -> None:
    class Machine(BrokerMachine):
        url = redis_url

    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    profile = settings(max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=checks)
    run_state_machine_as_test(Machine, settings=profile)
