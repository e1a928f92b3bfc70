"""What requests have lived through, as their events tell, and lists of them."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from penstock.shared.broker import Broker, DeadLetter, Queue, RequestFilter, RequestHistory
from penstock.shared.broker.bulk import cancel_matching, count_matching
from penstock.shared.broker.series import SeriesPoint, SeriesStore
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import ValidationError
from penstock.shared.keys import Keys
from penstock.shared.partitions import Layout, open_history, read_series
from penstock.shared.queue.lifecycle import MOVES, EventKind, RequestEvent, RequestState
from penstock.shared.queue.policy import QueuePolicy

from .conftest import die, enqueue, final, held, record, take
from .snapshot import read_snapshot


@pytest.fixture
def history(commands: CommandConnection, broker: Broker) -> RequestHistory:
    return RequestHistory(commands, broker.keys)


def told(events: list[RequestEvent]) -> list[tuple[str, str, int]]:
    return [(event.kind.value, event.engine_id, event.num_output_tokens) for event in events]


async def ids(history: RequestHistory, *, limit: int = 100, **wanted) -> list[str]:
    return [request.request_id for request in await history.requests(RequestFilter(**wanted), limit=limit)]


async def test_history_lists_all_three_engines_after_two_deaths(broker: Broker, history: RequestHistory) -> None:
    await enqueue(broker, "a", tenant="t", band="batch", num_prompt_tokens=5, max_tokens=7)
    epochs = []
    for number in range(3):
        (claim,) = await take(broker, f"e{number}", 1)
        epochs.append(claim.epoch)
        if number < 2:
            await broker.append([record("a", number + 1, number, 8)])
            await die(broker, f"e{number}", external=True)
    await broker.finish([final("a", 3, 2, 9)])
    events = await history.history("a")
    assert told(events) == [
        ("queued", "", 0),
        ("claimed", "e0", 0),
        ("reclaimed", "e0", 1),
        ("claimed", "e1", 1),
        ("reclaimed", "e1", 2),
        ("claimed", "e2", 2),
        ("finished", "e2", 3),
    ]
    assert [event.epoch for event in events if event.kind is EventKind.CLAIMED] == epochs
    assert {(event.tenant, event.band) for event in events} == {("t", "batch")}
    assert [event.cause for event in events] == ["", "", "it fell over", "", "it fell over", "", "stop"]
    assert (events[0].num_prompt_tokens, events[0].max_tokens) == (5, 7)
    assert (events[-1].num_attempts, events[-1].num_prompt_tokens) == (3, 5)
    assert [event.at for event in events] == sorted(event.at for event in events)
    for before, after in itertools.pairwise(events):
        assert after.state in MOVES[before.state]
    assert await history.events() == events


async def test_a_replayed_request_keeps_its_former_life(
    broker: Broker, history: RequestHistory, commands: CommandConnection
) -> None:
    await enqueue(broker, "a")
    await take(broker, "e0", 1)
    await die(broker, "e0", external=False, max_deliveries=1)
    assert await DeadLetter(commands, broker.keys).replay("a")
    await take(broker, "e1", 1)
    await broker.release([held("a", 1)])
    assert [event.kind.value for event in await history.history("a")] == [
        "queued",
        "claimed",
        "parked",
        "replayed",
        "claimed",
        "handed_back",
    ]
    assert (await history.history("a"))[2].cause == "poison_request: it fell over"


async def test_a_repeated_call_adds_no_second_event(broker: Broker, history: RequestHistory) -> None:
    await enqueue(broker, "a", call="c")
    await enqueue(broker, "a", call="c")
    await take(broker, "e0", 1)
    for _ in range(2):
        await broker.finish([final("a", 1, 0, 9)])
        await broker.cancel("a")
    assert [event.kind.value for event in await history.history("a")] == ["queued", "claimed", "finished"]


async def test_tokens_add_no_events(broker: Broker, history: RequestHistory) -> None:
    await enqueue(broker, "a")
    await take(broker, "e0", 1)
    before = await history.last_event_id()
    for index in range(20):
        await broker.append([record("a", 1, index, 7)])
    assert await history.last_event_id() == before
    assert len(await history.history("a")) == 2


async def test_history_of_ended_requests_outlives_their_results(
    broker: Broker, history: RequestHistory, commands: CommandConnection
) -> None:
    await enqueue(broker, "a", tenant="t")
    await take(broker, "e0", 1)
    await broker.finish([final("a", 1, 0, 9, 9)])
    await commands.execute("DEL", broker.keys.request("a"), broker.keys.log("a"))
    assert told(await history.history("a")) == [("queued", "", 0), ("claimed", "e0", 0), ("finished", "e0", 2)]
    (found,) = await history.requests(RequestFilter(states=("finished",)))
    assert (found.request_id, found.tenant, found.engine_id, found.num_output_tokens) == ("a", "t", "e0", 2)
    assert (found.cause, found.num_attempts) == ("stop", 1)
    assert (found.arrived_at or 0) <= (found.started_at or 0) <= (found.ended_at or 0) == found.at
    assert found.arrived_at
    assert await history.find("a") == found


async def test_lists_by_state_tenant_band_engine_id_and_time(broker: Broker, history: RequestHistory) -> None:
    await enqueue(broker, "done-1", "run-1", tenant="t0")
    await enqueue(broker, "run-2", tenant="t1", band="interactive")
    await take(broker, "e0", 1)
    await take(broker, "e1", 2)
    await enqueue(broker, "wait-1", tenant="t0", band="batch")
    await enqueue(broker, "wait-2", "wait-3", tenant="t1")
    await broker.finish([final("done-1", 1, 0, 9)])
    await enqueue(broker, "gone", tenant="t1")
    await broker.cancel("gone")
    assert await ids(history, states=("waiting",)) == ["wait-2", "wait-3", "wait-1"]
    assert set(await ids(history, states=("running",))) == {"run-1", "run-2"}
    assert await ids(history, states=("ended",)) == ["gone", "done-1"]
    assert await ids(history, states=("cancelled", "finished")) == ["gone", "done-1"]
    assert await ids(history, states=("failed",)) == []
    assert await ids(history, states=("waiting",), band="batch") == ["wait-1"]
    assert await ids(history, states=("waiting", "running"), tenant="t1") == ["run-2", "wait-2", "wait-3"]
    assert await ids(history, id_prefix="wait-3") == ["wait-3"]
    (run_2,) = await history.requests(RequestFilter(tenant="t1", states=("running",)))
    assert set(await ids(history, engine_id=run_2.engine_id)) >= {"run-2"}
    assert len(await ids(history)) == 7
    assert len(await ids(history, limit=2)) == 2
    (done,) = await history.requests(RequestFilter(states=("finished",)))
    assert "done-1" not in await ids(history, since=done.at + 0.001)
    assert "gone" in await ids(history, since=done.at)
    assert "done-1" in await ids(history, until=done.at)
    assert await ids(history, states=("ended",), until=done.at - 0.001) == []


async def test_a_replayed_request_is_no_longer_listed_as_parked(
    broker: Broker, history: RequestHistory, commands: CommandConnection
) -> None:
    await enqueue(broker, "a")
    await take(broker, "e0", 1)
    await die(broker, "e0", external=False, max_deliveries=1)
    assert await ids(history, states=("parked",)) == ["a"]
    await DeadLetter(commands, broker.keys).replay("a")
    assert await ids(history, states=("parked",)) == []
    assert await ids(history, states=("waiting",)) == ["a"]


async def test_events_are_followed_from_where_one_was(broker: Broker, history: RequestHistory) -> None:
    await enqueue(broker, "a")
    (first,) = await history.events()
    assert await history.events(after=first.event_id) == []
    await take(broker, "e0", 1)
    await broker.cancel("a")
    assert told(await history.events(after=first.event_id, limit=1)) == [("claimed", "e0", 0)]
    with pytest.raises(ValidationError, match="after must be the id of an event"):
        await history.events(after="yesterday")


async def test_the_stream_is_bounded(broker: Broker, queue: Queue, commands: CommandConnection) -> None:
    await queue.configure(QueuePolicy(events_kept=50))
    for number in range(400):
        await enqueue(broker, f"r{number}")
        await broker.cancel(f"r{number}")
    # Redis drops whole nodes of a hundred entries or so.
    assert await commands.execute("XLEN", broker.keys.events) <= 50 + 2 * 100


async def test_with_none_kept_nothing_is_written(
    broker: Broker, queue: Queue, history: RequestHistory, commands: CommandConnection
) -> None:
    await enqueue(broker, "before")
    await queue.configure(QueuePolicy(events_kept=0))
    await enqueue(broker, "a")
    await take(broker, "e0", 1)
    await broker.finish([final("before", 1, 0, 9)])
    found = await read_snapshot(commands, broker.keys)
    assert "events" not in found.kinds
    assert not [name for name in found.of("request")["a"] if name[0].isdigit()]
    assert await history.history("a") == []
    assert await ids(history) == ["a"]
    assert (await history.requests())[0].state is RequestState.QUEUED


async def test_a_foreign_entry_in_the_event_stream_hides_no_events(
    broker: Broker, history: RequestHistory, commands: CommandConnection
) -> None:
    await commands.execute("XADD", broker.keys.events, "*", "who", "knows")
    await enqueue(broker, "a")
    await commands.execute("XADD", broker.keys.events, "*", "e", "a\n\n\n1\nfrom_the_future\n3")
    assert told(await history.events()) == [("queued", "", 0)]


@pytest.mark.parametrize("wanted", [{"states": ("lost",)}])
def test_an_unknown_state_is_refused(wanted) -> None:
    with pytest.raises(ValidationError, match=r"states must be of waiting, running, .*got 'lost'"):
        RequestFilter(**wanted)


async def test_partitions_are_listed_as_one(commands: CommandConnection, broker: Broker, namespace: str) -> None:
    keys = Keys(namespace)
    layout = Layout(version=1, num=2, num_before=2, is_settled=True)
    await commands.execute("HSET", keys.layouts(), "m", msgspec.json.encode(layout))
    brokers = [Broker(commands, keys.model("m", number), number) for number in range(2)]
    for number, part in enumerate(brokers):
        await enqueue(part, f"run-{number}", f"wait-{number}", tenant=f"t{number}")
        (claim,) = await take(part, "e0", 1)
        await part.finish([final(claim.request_id, claim.epoch, 0, 9)])
        await SeriesStore(commands, part.keys).add("w", 1, {"tokens_out": 5, "latency_s:1": 2, "latency_s:sum": 7})
    history = await open_history(commands, keys, "m")
    assert await ids(history, states=("ended",)) == ["run-1", "run-0"]
    assert set(await ids(history, states=("waiting",))) == {"wait-0", "wait-1"}
    assert told(await history.history("run-1")) == [("queued", "", 0), ("claimed", "e0", 0), ("finished", "e0", 1)]
    assert (await history.find("wait-1") or pytest.fail("not found")).tenant == "t1"
    events = await history.events()
    assert [event.event_id for event in events] == sorted((event.event_id for event in events), key=_place)
    assert await history.last_event_id() == events[-1].event_id
    points = await read_series(commands, keys, "m", hours=2, step_s=3600)
    assert total_out(points) == 10
    assert [point.histograms["latency_s"].count for point in points if point.histograms] == [4]
    assert await count_matching(history, RequestFilter(states=("waiting",))) == 2
    assert await cancel_matching(history, RequestFilter(id_prefix="wait-")) == 2
    assert await ids(history, states=("waiting",)) == []


def _place(event_id: str) -> tuple[int, ...]:
    return tuple(map(int, event_id.split("-")))


def total_out(points: list[SeriesPoint]) -> int:
    return sum(point.tokens_out for point in points)
