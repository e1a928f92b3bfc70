"""A stateful property test: random histories of many engines against a model of the contract, on a real Redis.

Contract: a request runs under one epoch at a time; only its holder writes; the log has each token once and in
order; there is exactly one end; nothing vanishes before its end, whoever dies, is cancelled, reaped, paused or comes
back late; a request is parked only when enough engines have died on it, and the last on it alone. Lanes are handed out
in their order, higher bands first, and all that is counted of them is what is there (``agreement.py``).
"""

from __future__ import annotations

import copy
import os

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from penstock.shared.queue.lifecycle import RequestState
from penstock.shared.redis_access.url import CLUSTER_SCHEMES

from ..snapshot import read_snapshot, restore, save
from .agreement import check_all
from .engine_machine import CLIENTS, NUMBERS
from .expected import BANDS, TENANTS, ExpectedQueue, ExpectedRequest
from .home_machine import HomeMachine

# Drawn alike in each run. On a second server fewer show that its scripts do as those of the first.
NUM_HISTORIES = int(os.environ.get("PENSTOCK_TEST_HISTORIES", "80"))


class BrokerMachine(HomeMachine):
    """Clients vanish or cancel, deadlines pass, operators replay and purge, Redis forgets what it did lately."""

    saved: tuple[list[bytes], ExpectedQueue] | None = None

    @rule(client=st.sampled_from(CLIENTS[1:]))
    def client_vanishes(self, client: str) -> None:
        self.do(self.connection.execute("ZADD", self.broker.keys.clients, "XX", 0, client))
        for _ in range(2):
            self.do(self.reap())
        self.expected.expire(running_too=True)
        for request in self.expected.alive().values():
            if request.client == client:
                request.end_from_outside(RequestState.CANCELLED)

    @rule(number=NUMBERS)
    def replay(self, number: int) -> None:
        request_id = f"r{number}"
        known = self.expected.requests.get(request_id)
        is_parked = known is not None and known.state is RequestState.PARKED
        assert self.do(self.dead_letter.replay(request_id)) == is_parked
        if known is not None and is_parked:
            again = ExpectedRequest("", False, known.tenant, known.band, known.num_tokens, None, epoch=known.epoch)
            again.moves = [*known.moves, *again.moves]
            again.num_chunks, again.is_closed = known.num_chunks, known.num_chunks > 0
            self.expected.add(request_id, again)

    @rule(number=NUMBERS)
    def cancel(self, number: int) -> None:
        request_id = f"r{number}"
        request = self.expected.requests.get(request_id)
        reply = self.do(self.broker.cancel(request_id))
        if request is None:
            assert reply is None
            return
        if request.alive:
            request.end_from_outside(RequestState.CANCELLED)
        assert reply == request.state

    @rule(number=NUMBERS)
    def deadline_passes(self, number: int) -> None:
        """The server's clock cannot be moved, so the deadline is."""
        request_id = f"r{number}"
        request = self.expected.requests.get(request_id)
        if request is None or not request.alive or request.deadline is None:
            return
        request.deadline = 0
        self.do(self.move_deadline(request_id, request))

    async def move_deadline(self, request_id: str, request: ExpectedRequest) -> None:
        keys = self.broker.keys
        await self.connection.execute("HSET", keys.request(request_id), "deadline", 0)
        await self.connection.execute("ZADD", keys.prefix + "deadlines", 0, request_id)
        if request.is_fresh:
            entry = await self.connection.execute("HGET", keys.request(request_id), "entry")
            await self.connection.execute("ZADD", keys.prefix + f"due:{request.lane}", "XX", 0, entry)

    @rule(running_too=st.booleans())
    def expire(self, running_too: bool) -> None:
        num_expired = self.do(self.broker.expire(grace_ms=0 if running_too else 2**50))
        assert num_expired == self.expected.expire(running_too=running_too)

    @rule(tenant=st.sampled_from(TENANTS), band=st.sampled_from(("", *BANDS)))
    def purge(self, tenant: str, band: str) -> None:
        doomed = [r for r in self.expected.requests.values() if r.is_fresh and r.tenant == tenant]
        doomed = [r for r in doomed if band in ("", r.band)]
        assert self.do(self.queue.purge(tenant, band)) == len(doomed)
        for request in doomed:
            request.end_from_outside(RequestState.CANCELLED)

    @rule()
    def save(self) -> None:
        """A replica hears of nothing from now on, or a backup is made."""
        self.saved = self.do(save(self.connection, self.broker.keys)), copy.deepcopy(self.expected)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def roll_back(self) -> None:
        """The replica is promoted, or the backup restored. What owners hold that it never knew is refused for ever."""
        assert self.saved is not None
        keys, expected = self.saved
        self.do(restore(self.connection, self.broker.keys, keys))
        self.expected = copy.deepcopy(expected)

    @invariant()
    def redis_agrees(self) -> None:
        check_all(self.do(read_snapshot(self.connection, self.broker.keys)), self.expected)


@pytest.mark.slow
def test_random_histories_keep_the_contract(broker_on: str) -> None:
    class Machine(BrokerMachine):
        # A snapshot walks over all keys of a database, most of them those of other tests; a cluster has only one.
        url = broker_on if broker_on.startswith(CLUSTER_SCHEMES) else f"{broker_on}?db=1"

    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    # Not Phase.explain: it takes longer than the test may.
    phases = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
    profile = settings(
        max_examples=NUM_HISTORIES, stateful_step_count=50, deadline=None, suppress_health_check=checks, phases=phases
    )
    run_state_machine_as_test(Machine, settings=profile)
