"""What must hold of Redis after every change of state, as assertions on a snapshot."""

from __future__ import annotations

import re
from collections import Counter

import msgspec

from penstock.shared import keys
from penstock.shared.messages.deltas import Delta
from penstock.shared.queue.lifecycle import RequestState, decode_event

from ..snapshot import Snapshot
from .expected import BANDS, ExpectedQueue, ExpectedRequest

# Every kind of key that is documented.
_KINDS = set(re.findall(r"NS:\{MODEL\}:([a-z_]+)", str(keys.__doc__)))
_decoder = msgspec.msgpack.Decoder(Delta)


def check_all(found: Snapshot, expected: ExpectedQueue) -> None:
    assert found.kinds <= _KINDS
    check_requests(found, expected)
    check_events(found, expected)
    check_lanes(found, expected)
    check_turns(found, expected)
    check_sums(found, expected)
    check_claims(found, expected)
    check_registers(found, expected)
    check_rooms(found, expected)
    check_warmth(found, expected)
    check_homes(found, expected)


def check_requests(found: Snapshot, expected: ExpectedQueue) -> None:
    """The log has each token once and in order, and at most one end; only what has ended expires."""
    assert found.of("request").keys() == expected.requests.keys()
    for request_id, request in expected.requests.items():
        assert found.of("request")[request_id]["state"] == request.state
        log = [_decoder.decode(record) for record in found.of("log").get(request_id, [])]
        assert [token for delta in log for token in delta.token_ids] == request.tokens
        assert sum(delta.finished for delta in log) == request.num_ends <= 1
        assert not any(delta.finished for delta in log[:-1])
        assert (found.ttl_ms("request", request_id) == -1) == request.alive
        if log:
            assert (found.ttl_ms("log", request_id) == -1) == request.alive


def check_events(found: Snapshot, expected: ExpectedQueue) -> None:
    """Each move of a request has one event, of the state and the tokens that it had then, and nothing else has one."""
    told: set[tuple[str, str]] = set()
    for request_id, request in expected.requests.items():
        record = found.of("request")[request_id]
        entries = sorted((name for name in record if re.fullmatch(r"\d+-\d+", name)), key=_place)
        events = [decode_event(entry, record[entry].encode("latin-1"), request_id=request_id) for entry in entries]
        assert [(event.state, event.num_output_tokens) for event in events if event] == request.moves
        if request.state is RequestState.CLAIMED:
            last = events[-1]
            assert last is not None
            assert (last.engine_id, last.epoch, last.num_attempts) == (request.engine, request.epoch, request.attempts)
        told |= {(entry, request_id) for entry in entries}
    assert set(found.one("events") or []) == told


def _place(entry: str) -> tuple[int, ...]:
    return tuple(int(part) for part in entry.split("-"))


def check_lanes(found: Snapshot, expected: ExpectedQueue) -> None:
    """Check that lanes hold the requests that were never claimed, in order of arrival, and that none is empty."""
    lanes = expected.lanes()
    standing = {name: [request_id for _, request_id in entries] for name, entries in found.of("lane").items()}
    assert standing == lanes
    for name, entries in found.of("lane").items():
        deadlines: dict[str, float] = {}
        for entry, request_id in entries:
            assert found.of("request")[request_id]["entry"] == entry
            deadline = expected.requests[request_id].deadline
            if deadline is not None:
                deadlines[entry] = deadline
        assert found.of("due").get(name, {}) == deadlines
    assert found.of("due").keys() <= lanes.keys()
    fresh = {request_id for lane in lanes.values() for request_id in lane}
    assert {request_id for request_id, hash in found.of("request").items() if "entry" in hash} == fresh


def check_turns(found: Snapshot, expected: ExpectedQueue) -> None:
    """A lane is in line for its turn, or its tenant is blocked; a tenant without a lane is in neither line."""
    lanes, blocked = expected.lanes(), found.one("blocked")
    in_line = {lane for lane in lanes if lane.partition(":")[2] not in blocked}
    for kind in ("ready", "heads"):
        assert {f"{band}:{tenant}" for band, tenants in found.of(kind).items() for tenant in tenants} == in_line
    for band in BANDS:
        ready = found.of("ready").get(band, {})
        assert not ready.keys() & found.of("idle").get(band, {}).keys()
        assert float(found.one("queue").get(f"weight:{band}", 0)) == len(ready)
        for tenant, arrival_ms in found.of("heads").get(band, {}).items():
            arrivals = [int(entry.partition("-")[0]) for entry, _ in found.of("lane")[f"{band}:{tenant}"]]
            assert arrival_ms in arrivals
            assert expected.order == "edf" or arrival_ms == arrivals[0]
    # A tenant is blocked here only by its requests under way.
    assert all(until == float("inf") and expected.started(tenant) > 0 for tenant, until in blocked.items())


def check_sums(found: Snapshot, expected: ExpectedQueue) -> None:
    """Depths and tokens are those of the lanes, for each tenant and all together; nothing is kept of an idle tenant."""
    alive = list(expected.alive().values())
    tenants = {request.tenant for request in alive}
    assert found.of("tenant").keys() == tenants
    assert set(found.one("active")) == tenants
    for tenant in tenants:
        of_tenant = [request for request in alive if request.tenant == tenant]
        assert _sums(found.of("tenant")[tenant]) == _expected_sums(of_tenant)
    # What awaits input is under way for its tenant, but not for the queue.
    not_awaiting = [request for request in alive if request.state != "awaiting_input"]
    assert _sums(found.one("queue")) == _expected_sums(not_awaiting)
    assert int(found.one("queue").get("num_awaiting", 0)) == len(alive) - len(not_awaiting)


def check_claims(found: Snapshot, expected: ExpectedQueue) -> None:
    """Redis and the model agree on who holds what; what waits for its next engine stands in exactly one line."""
    held: dict[str, dict[str, str]] = {}
    for request_id, request in expected.alive().items():
        if request.engine:
            held.setdefault(request.engine, {})[request_id] = str(request.epoch)
    assert found.of("claims") == held
    assert set(found.one("leases")) == expected.leases
    assert set(found.one("rooms")) <= expected.leases
    lines = {line: [request_id.decode() for request_id in found.one(line)] for line in ("returned", "suspects")}
    standing = {request_id: line for line, request_ids in lines.items() for request_id in request_ids}
    assert len(standing) == sum(map(len, lines.values()))
    assert standing.keys() == {request_id for request_id, r in expected.requests.items() if r.is_returned}
    for request_id, hash in found.of("request").items():
        assert hash.get("line") == standing.get(request_id)


def check_rooms(found: Snapshot, expected: ExpectedQueue) -> None:
    """Sums of rooms are those of the rooms; who is woken for what comes has a room and left some of it."""
    rooms = [[int(number) for number in text.split()] for text in found.one("rooms").values()]
    queue = found.one("queue")
    assert int(queue.get("rooms", 0)) == len(rooms)
    assert found.one("rooms").keys() == expected.rooms.keys()
    for i, name in enumerate(("room_seqs", "room_held_seqs", "room_tokens", "room_held_tokens")):
        assert int(queue.get(name, 0)) == sum(room[i] for room in rooms)
    assert found.one("vacant").keys() <= expected.vacant & found.one("rooms").keys()


def check_warmth(found: Snapshot, expected: ExpectedQueue) -> None:
    """Check which engine last got each beginning; what waits with a mark, and nothing else, stands with its engine."""
    assert found.of("warm") == {digest: engine.encode() for digest, engine in expected.warm.items()}
    assert {engine: set(ids) for engine, ids in found.of("warm_for").items()} == expected.warm_for()
    for request_id, request in expected.requests.items():
        marked = found.of("request")[request_id].get("warm", "")
        assert marked == (request.warm if request.is_fresh else "")


def check_homes(found: Snapshot, expected: ExpectedQueue) -> None:
    """Each home has a state, and only a home that sleeps has a grant."""
    assert set(found.one("homes")) == expected.homes.keys()
    levels = {device: int(state.split()[0]) for device, state in found.one("home_states").items()}
    assert levels == expected.homes
    assert set(found.one("grants")) == expected.grants


def check_registers(found: Snapshot, expected: ExpectedQueue) -> None:
    """Bytes, deadlines and interests of a request are kept as long as it lives."""
    alive = expected.alive()
    assert found.of("payload").keys() == {request_id for request_id, r in alive.items() if r.attempts > 0}
    deadlines = {request_id: r.deadline for request_id, r in alive.items() if r.deadline is not None}
    assert found.one("deadlines") == deadlines
    assert set(found.one("fail_fast")) == {request_id for request_id, r in alive.items() if r.fail_fast}
    inputs = {request_id: r.num_chunks - 1 for request_id, r in expected.requests.items() if r.num_chunks > 1}
    assert {request_id: len(chunks) for request_id, chunks in found.of("input").items()} == inputs
    for request_id in inputs:
        assert (found.ttl_ms("input", request_id) == -1) == (request_id in alive)
    clients = {client: request_ids for client, request_ids in found.of("client").items() if request_ids}
    expected_clients: dict[str, set[str]] = {}
    for request_id, request in alive.items():
        if request.client:
            expected_clients.setdefault(request.client, set()).add(request_id)
    assert clients == expected_clients


def _sums(hash: dict[str, str]) -> dict[str, int]:
    """Its fields that count something now, without those that are 0."""
    names = [name for name in hash if name == "num_started" or name.startswith(("depth:", "tokens:"))]
    return {name: int(hash[name]) for name in names if hash[name] != "0"}


def _expected_sums(requests: list[ExpectedRequest]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for request in requests:
        if request.is_fresh:
            sums[f"depth:{request.band}"] += 1
            sums[f"tokens:{request.band}"] += request.num_tokens
        elif request.attempts > 0:
            sums["num_started"] += 1
    return {name: count for name, count in sums.items() if count}
