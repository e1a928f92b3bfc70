from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.shared import connection as connection_module
from penstock.shared.broker import NEW, SCRIPTS, Broker, Claim, EngineCapacity, FinalRecord, Queue, Record
from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.deployment.records import DeathCause
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.redis_access.script import script_of
from penstock.shared.shards import make_pair

from ...moved_clock import MovedClock
from ...redis_server import RedisServer
from ..conftest import LONG_MS
from .snapshot import read_snapshot

TTL_MS = 60_000
CAUSE = DeathCause(engine_id="e0", reason="it fell over", last_step=7, trace="Traceback")


# Of each request and owner: epochs are by the server's clock. Request ids are those of one test.
_epochs: dict[tuple[str, int], int] = {}


# What runs on a cluster and in another database, too: where channels, counts of subscribers and damage are.
ON_BOTH = ("test_deaths", "test_homes", "test_input", "test_pause", "test_scripts", "test_wakes")


def change_script(monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str) -> None:
    """Run a script with another text in this test."""
    script = SCRIPTS[name]
    text = script.text.replace(old, new)
    assert text != script.text
    monkeypatch.setitem(SCRIPTS, name, script_of(name, text))


def leave_to_others_for(monkeypatch: pytest.MonkeyPatch, leave_ms: int) -> None:
    """Set for how long an engine that holds its part leaves requests to others, in this test."""
    change_script(monkeypatch, "claim", "PATIENCE_MS = 100", f"PATIENCE_MS = {leave_ms}")


@pytest.fixture
def patient_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines leave requests to each other for so long that a slow machine makes no difference."""
    leave_to_others_for(monkeypatch, 60_000)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tell each test that talks to Redis where: "server", "cluster", "database" (not number 0), or "moved_clock"."""
    if "broker_on" in metafunc.fixturenames:
        places = [metafunc.config.getoption("--broker-on")]
        if "clock" in metafunc.fixturenames:
            places = ["moved_clock"]
        elif metafunc.definition.path.stem in ON_BOTH and places == ["server"]:
            places += ["cluster", "database"]
        metafunc.parametrize("broker_on", places, indirect=True, ids=[f"on_{place}" for place in places])


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    """Clock of the server of a test that names it."""
    clock = MovedClock(tmp_path / "moved")
    monkeypatch.setenv("PENSTOCK_REDIS_SERVER", str(clock.program))
    return clock


@pytest.fixture
def moved_server_url(clock: MovedClock, tmp_path: Path) -> Iterator[str]:
    """URL of a server of the test's own, which goes by ``clock``."""
    server = RedisServer(tmp_path / "redis")
    server.start()
    try:
        server.wait_until_ready()
        yield server.url
    finally:
        server.kill()


@pytest.fixture
def broker_on(request: pytest.FixtureRequest) -> str:
    """The URL of the Redis that the test is about."""
    if request.param == "moved_clock":
        return request.getfixturevalue("moved_server_url")
    if request.param in ("server", "database"):
        url = request.getfixturevalue("redis_url")
        return url if request.param == "server" else f"{url}?db=3"
    return request.getfixturevalue("cluster").url


@pytest.fixture(autouse=True)
def _patient_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that a busy machine keeps silent for seconds is not asked again: what it has done it says once."""
    monkeypatch.setattr(connection_module, "MAX_SILENT_LOOKS", 120)


@pytest.fixture
async def commands(broker_on: str) -> AsyncIterator[CommandConnection]:
    connection, _ = make_pair(broker_on)
    yield connection
    await connection.close()


@pytest.fixture
async def subscriber(broker_on: str) -> AsyncIterator[Subscriber]:
    _, following = make_pair(broker_on)
    await following.open()
    yield following
    await following.close()


@pytest.fixture
def broker(commands: CommandConnection, namespace: str) -> Broker:
    _epochs.clear()
    return Broker(commands, Keys(namespace).model("m"))


@pytest.fixture
def queue(commands: CommandConnection, broker: Broker) -> Queue:
    return Queue(commands, broker.keys)


async def enqueue(broker: Broker, *request_ids: str, **options: Any) -> None:
    """Put requests in line; ``options`` are fields of ``Entry``."""
    for request_id in request_ids:
        assert await broker.enqueue(request_id, b"payload", result_ttl_ms=TTL_MS, **options) == NEW


async def take(
    broker: Broker, engine_id: str, limit: int, *, num_held: int = 0, lease_ttl_ms: int = LONG_MS
) -> list[Claim]:
    """Claim for an engine that holds ``num_held`` requests, takes ``limit`` more and has any amount of cache."""
    room = EngineCapacity(max_num_seqs=num_held + limit, num_seqs=num_held)
    claims = (await broker.claim(engine_id, room, lease_ttl_ms=lease_ttl_ms)).claims
    _epochs.update({(claim.request_id, claim.attempt): claim.epoch for claim in claims})
    return claims


async def served_per_s(commands: CommandConnection, broker: Broker, unit: str = "requests") -> float:
    """The rate at which requests, or tokens, were served while any were under way: it says when to come back."""
    served, ms = await commands.execute("HMGET", broker.keys.prefix + "queue", f"rate_{unit}", "rate_ms")
    return 1000 * float(served) / float(ms)


def held(request_id: str, owner: int = 1) -> tuple[str, int]:
    """Return the id and the epoch that its first, second, … owner (claims are counted from 1) got.

    An epoch itself is taken as it is.
    """
    return request_id, _epochs.get((request_id, owner), owner)


def record(request_id: str, owner: int, index: int, *token_ids: int) -> Record:
    return Record(*held(request_id, owner), Delta(index=index, token_ids=list(token_ids), text="x" * len(token_ids)))


def final(request_id: str, owner: int, index: int, *token_ids: int) -> FinalRecord:
    delta = Delta(index=index, token_ids=list(token_ids), finish_reason=FinishReason.STOP)
    return FinalRecord(*held(request_id, owner), delta)


async def finish_with(broker: Broker, claim: Claim, *, num_output: int) -> None:
    """End a request that has logged nothing yet, with so many tokens."""
    assert await broker.finish([final(claim.request_id, claim.epoch, 0, *range(num_output))]) == []


async def die(broker: Broker, engine_id: str, *, external: bool, max_deliveries: int = 3) -> tuple[int, int]:
    return await broker.reclaim(engine_id, CAUSE, is_external=external, max_deliveries=max_deliveries)


async def assert_nothing_is_left(commands: CommandConnection, broker: Broker) -> None:
    """After the end of all requests: results that expire, and what is known of queue and engines."""
    found = await read_snapshot(commands, broker.keys)
    assert found.kinds <= {
        "request",
        "log",
        "events",
        "series",
        "ledger",
        "queue",
        "policy",
        "leases",
        "rooms",
        "vacant",
        "reaper",
        "idle",
        "parked",
        "dead",
        "retry",
    }
    assert all(found.ttl_ms(kind, name) > 0 for kind in ("request", "log", "retry") for name in found.of(kind))
    counts = {name: value for name, value in found.one("queue").items() if name.startswith(("depth", "tokens", "num_"))}
    assert set(counts.values()) <= {"0"}
