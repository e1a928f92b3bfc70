"""A stateful property test: random histories of many engines against a model of the contract, on a real Redis.

Contract: a request runs under one epoch at a time; only its holder writes; the log has each token once and in
order; there is exactly one end; nothing vanishes from the lane before its end.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from penstock.shared.broker import NEW, Broker, FinalRecord, Record
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import GROUP, Keys
from penstock.shared.messages import Delta, FinishReason

TTL_MS = 60_000
ENGINES = ("e0", "e1", "e2")


@dataclass
class Expected:
    """What the model says of one request."""

    state: str = "queued"
    epoch: int = 0
    attempts: int = 0
    tokens: list[int] = field(default_factory=list)
    num_ends: int = 0


@dataclass(frozen=True)
class Holding:
    """What an engine believes: it may be stale."""

    request_id: str
    epoch: int


class BrokerMachine(RuleBasedStateMachine):
    url: str
    holdings: Bundle[Holding] = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.connection = CommandConnection(self.url)
        self.broker = Broker(self.connection, Keys(f"test-{uuid.uuid4().hex}").model("m"))
        self.expected: dict[str, Expected] = {}
        self.waiting: list[str] = []  # the order of claims: handed back first, then the lane
        self.returned: list[str] = []
        self.token = itertools.count()

    def do(self, work):
        return self.loop.run_until_complete(work)

    def holds(self, holding: Holding) -> bool:
        request = self.expected[holding.request_id]
        return request.state == "claimed" and request.epoch == holding.epoch

    def refused(self, holding: Holding) -> list[str]:
        return [] if self.holds(holding) else [holding.request_id]

    @rule(number=st.integers(0, 30))
    def enqueue(self, number: int) -> None:
        request_id = f"r{number}"
        known = self.expected.get(request_id)
        reply = self.do(self.broker.enqueue(request_id, b"p", result_ttl_ms=TTL_MS, detached=False))
        assert reply == (NEW if known is None else known.state)
        if known is None:
            self.expected[request_id] = Expected()
            self.waiting.append(request_id)

    @rule(target=holdings, engine=st.sampled_from(ENGINES))
    def claim_one(self, engine: str) -> Holding:
        wave = self.do(self.broker.claim(engine, 1))
        line = self.returned or self.waiting
        assert [claim.request_id for claim in wave] == line[:1]
        if not wave:
            return Holding("r0", -1) if "r0" in self.expected else self._nothing()
        request = self.expected[line.pop(0)]
        request.state, request.epoch, request.attempts = "claimed", request.epoch + 1, request.attempts + 1
        claim = wave[0]
        assert (claim.epoch, claim.attempt, claim.num_logged_tokens) == (
            request.epoch,
            request.attempts,
            len(request.tokens),
        )
        return Holding(claim.request_id, claim.epoch)

    def _nothing(self) -> Holding:
        self.enqueue(0)
        return Holding("r0", -1)

    @rule(holding=holdings, num_tokens=st.integers(1, 3), times=st.integers(1, 2))
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
            request.state, request.num_ends = "finished", request.num_ends + 1

    @rule(holding=holdings)
    def release(self, holding: Holding) -> None:
        held = self.holds(holding)
        assert self.do(self.broker.release([(holding.request_id, holding.epoch)])) == int(held)
        if held:
            self.expected[holding.request_id].state = "queued"
            self.returned.append(holding.request_id)

    @rule(number=st.integers(0, 30))
    def cancel(self, number: int) -> None:
        request_id = f"r{number}"
        request = self.expected.get(request_id)
        reply = self.do(self.broker.cancel(request_id))
        if request is None:
            assert reply is None
            return
        if request.state in ("queued", "claimed"):
            request.state, request.epoch, request.num_ends = "cancelled", request.epoch + 1, request.num_ends + 1
            for line in (self.waiting, self.returned):
                if request_id in line:
                    line.remove(request_id)
        assert reply == request.state

    @invariant()
    def the_log_has_each_token_once_and_at_most_one_end(self) -> None:
        for request_id, request in self.expected.items():
            log = self.do(self.broker.read_log(request_id))
            assert [token for delta in log for token in delta.token_ids] == request.tokens
            assert sum(delta.finished for delta in log) == request.num_ends <= 1
            assert not any(delta.finished for delta in log[:-1])

    @invariant()
    def the_lane_holds_what_has_not_ended(self) -> None:
        alive = [r for r in self.expected.values() if r.state in ("queued", "claimed")]
        assert self.do(self.connection.execute("XLEN", self.broker.keys.lane)) == len(alive)
        if any(r.attempts for r in self.expected.values()):
            pending = self.do(self.connection.execute("XPENDING", self.broker.keys.lane, GROUP))[0]
            assert pending == sum(r.attempts > 0 for r in alive)

    def teardown(self) -> None:
        self.do(self.connection.close())
        self.loop.close()


def test_random_histories_keep_the_contract(redis_url: str) -> None:
    class Machine(BrokerMachine):
        url = redis_url

    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    profile = settings(max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=checks)
    run_state_machine_as_test(Machine, settings=profile)
