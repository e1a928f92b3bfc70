"""Random histories of engines against the model of ``expected.py``; ``test_contract.py`` has what else may happen."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import consumes, rule

from penstock.shared.broker import Claim, FinalRecord, Record
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.queue.lifecycle import RequestState

from ..conftest import CAUSE
from .claim_machine import CLIENTS, ENGINES, LEASE_MS, NUMBERS, ClaimMachine, Holding
from .expected import ExpectedRequest

__all__ = ["CLIENTS", "ENGINES", "NUMBERS", "EngineMachine", "Holding"]

MAX_DELIVERIES = 2
# What an engine may still hold that Redis has forgotten.
NOBODYS = ExpectedRequest("", False, "", "", 0, None)


class EngineMachine(ClaimMachine):
    """Engines do with what they hold what they may do, or die."""

    holdings = ClaimMachine.holdings

    def holds(self, holding: Holding) -> bool:
        request = self.expected.requests.get(holding.request_id)  # gone if Redis has forgotten it
        return request is not None and request.state is RequestState.CLAIMED and request.epoch == holding.epoch

    def refused(self, holding: Holding) -> list[str]:
        return [] if self.holds(holding) else [holding.request_id]

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
        self.expected.rooms.pop(engine, None)

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
        self.expected.rooms.pop(engine, None)
        for request_id, request in held.items():
            request.num_deaths += 1
            if self.do(self.connection.execute("ZSCORE", self.broker.keys.dead, request_id)) is not None:
                assert len(held) == 1
                assert request.num_deaths >= MAX_DELIVERIES
                request.end_from_outside(RequestState.PARKED)
                num_parked -= 1
            else:
                request.queue_again()
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
