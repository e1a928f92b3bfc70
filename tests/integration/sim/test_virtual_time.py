"""The broker's scripts under a clock that the test sets. What they do else, the tests of the broker say."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources

import pytest

from penstock.ops import sim
from penstock.ops.sim.virtual_redis import EPOCH_US, VirtualConnection, run_now
from penstock.shared.broker import SCRIPTS, Broker, Claim, EngineCapacity, FinalRecord
from penstock.shared.deployment.records import DeathCause
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason

# Commands of which the answer, or what becomes of it, depends on time or on who listens.
TIMED = {
    "TIME",
    "XADD",
    "PUBLISH",
    "SPUBLISH",
    "SET",
    "SETEX",
    "PSETEX",
    "GETEX",
    "EXPIRE",
    "PEXPIRE",
    "EXPIREAT",
    "PEXPIREAT",
    "EXPIRETIME",
    "PEXPIRETIME",
    "TTL",
    "PTTL",
    "PERSIST",
}
CAUSE = DeathCause(engine_id="e0", reason="it fell over")


@pytest.fixture
def connection(redis_url: str, namespace: str) -> Iterator[VirtualConnection]:
    connection = VirtualConnection(redis_url, Keys(namespace).model("m"))
    yield connection
    run_now(connection.close())


@pytest.fixture
def broker(connection: VirtualConnection, namespace: str) -> Broker:
    return Broker(connection, Keys(namespace).model("m"))


def advance(connection: VirtualConnection, seconds: float) -> None:
    connection.now_us += round(1e6 * seconds)
    connection.expire()


def enqueue(broker: Broker, request_id: str, **options: int) -> None:
    run_now(broker.enqueue(request_id, b"payload", result_ttl_ms=1000, **options))


def claim(broker: Broker, room: EngineCapacity | None = None) -> list[Claim]:
    return run_now(broker.claim("e0", room or EngineCapacity(max_num_seqs=4))).claims


def test_every_command_that_knows_the_time_is_answered_by_the_clock() -> None:
    text = "".join(script.text for script in SCRIPTS.values())
    used = set(re.findall(r"(?:call|attempt)\('([A-Z]+)'", text))
    answered = set(re.findall(r"commands\.(\w+)\(", (resources.files(sim) / "virtual_time.lua").read_text()))
    assert used & TIMED == answered


def test_waits_and_epochs_are_by_the_clock(connection: VirtualConnection, broker: Broker) -> None:
    enqueue(broker, "r1")
    advance(connection, 1234.5)
    (taken,) = claim(broker)
    assert taken.waited_ms == 1_234_500
    assert taken.epoch == EPOCH_US + 1_234_500_000


def test_simultaneous_requests_are_claimed_in_order(connection: VirtualConnection, broker: Broker) -> None:
    for number in range(20):
        enqueue(broker, f"r{number}")
    assert [one.request_id for one in claim(broker, EngineCapacity(max_num_seqs=20))] == [
        f"r{number}" for number in range(20)
    ]


def test_leases_end_by_the_clock(connection: VirtualConnection, broker: Broker) -> None:
    enqueue(broker, "r1")
    claim(broker)
    found: list[float] = []
    for _ in range(14):
        advance(connection, 0.5)
        if run_now(broker.reap(CAUSE, max_deliveries=3)):
            found.append((connection.now_us - EPOCH_US) / 1e6)
    # The first look waits for all to renew once: 0.5 s and a lease of 3 s.
    assert found == [3.5]


def test_results_are_forgotten_by_the_clock(connection: VirtualConnection, broker: Broker) -> None:
    enqueue(broker, "r1")
    (taken,) = claim(broker)
    end = Delta(index=0, token_ids=[1], finish_reason=FinishReason.STOP)
    assert run_now(broker.finish([FinalRecord("r1", taken.epoch, end)])) == []
    advance(connection, 0.9)
    assert run_now(broker.state("r1")) is not None
    advance(connection, 0.2)
    assert run_now(broker.state("r1")) is None


def test_a_reservation_ends_by_the_clock(connection: VirtualConnection, broker: Broker) -> None:
    enqueue(broker, "large", num_prompt_tokens=90, max_tokens=10)
    room = EngineCapacity(max_num_seqs=4, num_seqs=1, num_kv_tokens=100, num_held_kv_tokens=50)
    assert claim(broker, room) == []
    reserved = broker.keys.prefix + "reserved"
    advance(connection, 9.9)
    assert run_now(connection.execute("GET", reserved)) == b"e0"
    assert run_now(connection.execute("PTTL", reserved)) == -1  # the server's clock has no say
    advance(connection, 0.2)
    assert run_now(connection.execute("GET", reserved)) is None


def test_wakes_are_published_and_output_is_not(connection: VirtualConnection, broker: Broker) -> None:
    claim(broker)
    enqueue(broker, "r1")
    assert connection.published == [broker.keys.engine_wake("e0")]
    (taken,) = claim(broker)
    run_now(broker.finish([FinalRecord("r1", taken.epoch, Delta(finish_reason=FinishReason.STOP))]))
    assert connection.published == [broker.keys.engine_wake("e0")]
