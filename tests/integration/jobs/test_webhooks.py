"""Events from the end of a request to a receiver that verifies them, through real jobs processes that are killed."""

from __future__ import annotations

import asyncio
import json

import pytest

from penstock.ops import cli as penstock_cli
from penstock.producer import Client, SamplingParams
from penstock.producer.background.agenda import Agenda
from penstock.producer.webhooks.event_store import EventStore
from penstock.producer.webhooks.events import EventState, WebhookEvent, WebhookTarget
from penstock.producer.webhooks.outbox import Outbox, outbox_command
from penstock.producer.webhooks.secrets import SecretStore
from penstock.shared.broker import Broker, Claim, DeadLetter, EngineCapacity, FinalRecord
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import DeathCause
from penstock.shared.errors import ValidationError
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason, RequestError, Usage

from .conftest import Start
from .processes import until
from .receiver import Receiver

OPTIONS = ["--allow-private-webhooks", "127.0.0.0/8", "--webhook-first-delay", "0.05", "--webhook-attempts", "3"]


@pytest.fixture
async def secrets(commands: CommandConnection, namespace: str, receiver: Receiver) -> SecretStore:
    secrets = SecretStore(commands, Keys(namespace))
    receiver.secret = (await secrets.create("acme")).current
    return secrets


@pytest.fixture
def store(commands: CommandConnection, namespace: str) -> EventStore:
    keys = Keys(namespace)
    return EventStore(commands, keys, Agenda(commands, keys))


async def claim_all(broker: Broker, num: int) -> dict[str, Claim]:
    claims = (await broker.claim("e0", EngineCapacity(max_num_seqs=num), lease_ttl_ms=600_000)).claims
    assert len(claims) == num
    return {claim.request_id: claim for claim in claims}


async def finish(broker: Broker, claim: Claim, reason: FinishReason, error: RequestError | None = None) -> None:
    delta = Delta(token_ids=[7], text="a", finish_reason=reason, usage=Usage(3, 1), error=error)
    assert await broker.finish([FinalRecord(claim.request_id, claim.epoch, delta)]) == []
    # A lost reply: the script runs twice, and the end is told once.
    assert await broker.finish([FinalRecord(claim.request_id, claim.epoch, delta)]) == []


def types_by_request(receiver: Receiver) -> dict[str, list[str]]:
    types: dict[str, list[str]] = {}
    for event in receiver.events.values():
        types.setdefault(event["data"]["id"], []).append(event["type"])
    return types


@pytest.mark.slow
async def test_every_end_is_one_event_whoever_is_killed(
    start: Start, client: Client, broker: Broker, receiver: Receiver, secrets: SecretStore, commands: CommandConnection
) -> None:
    process = start(*OPTIONS)
    url = receiver.url("/hook", "localhost")
    greedy = SamplingParams(max_tokens=1)
    for number in range(8):
        await client.submit([1, 2], greedy, request_id=f"r{number}", webhook_url=url)
    await client.submit([1, 2], SamplingParams(n=2, max_tokens=1), request_id="both", webhook_url=url)
    await client.submit([1, 2], greedy, request_id="held", webhook_url=receiver.url("/held", "localhost"))
    await client.submit([1, 2], greedy, request_id="resp_1", webhook_url=url, webhook_events="response")
    await client.submit([1, 2], greedy, request_id="untold")
    await client.submit([1, 2], greedy, request_id="late", webhook_url=url, timeout_s=0.001)
    claims = await claim_all(broker, 13)

    async def has_expired() -> bool:
        await broker.expire()
        return await broker.state("late") == "expired"

    await until(has_expired, "a request past its deadline does not end")
    await finish(broker, claims["r0"], FinishReason.STOP)
    await finish(broker, claims["held"], FinishReason.STOP)
    await until(lambda: _seen(receiver, 3), "the first events do not come")
    process.kill()  # in the middle of an attempt, whose answer nobody gets
    receiver.released.set()
    # While nobody is there to tell them.
    await finish(broker, claims["r1"], FinishReason.ERROR, RequestError("bad", "no"))
    await client.cancel("r2")
    await broker.park(claims["r3"], DeathCause(engine_id="e0", reason="x"), "poison_request", "parked")
    await finish(broker, claims["resp_1"], FinishReason.LENGTH)
    await finish(broker, claims["untold"], FinishReason.STOP)
    await finish(broker, claims["both"], FinishReason.STOP)
    process = start(*OPTIONS)
    await until(lambda: _seen(receiver, 7), "events of the time without a process do not come")
    for number in range(4, 8):
        await finish(broker, claims[f"r{number}"], FinishReason.LENGTH)
        if number == 5:
            process.kill()
            process = start(*OPTIONS)
    await finish(broker, claims["both~1"], FinishReason.LENGTH)
    # A parked request that is replayed ends a second time, and that is another event.
    assert await DeadLetter(commands, broker.keys).replay("r3")
    await finish(broker, (await claim_all(broker, 1))["r3"], FinishReason.STOP)
    await until(lambda: _seen(receiver, 13), "not all events come")

    async def held_again() -> bool:
        return list(receiver.seen["/held"].values()) == [2]

    await until(held_again, "an attempt that died with its process is not made again")
    check_events(receiver)
    assert await commands.execute("XLEN", broker.keys.outbox) == 0
    assert process.stop() == 0


def check_events(receiver: Receiver) -> None:
    """Check that there is one event for each end of the requests of the test above."""
    completed = {name: ["request.completed"] for name in ("r0", "r4", "r5", "r6", "r7", "both", "held")}
    others = {"r1": ["request.failed"], "r2": ["request.cancelled"], "late": ["request.expired"]}
    told = types_by_request(receiver)
    assert sorted(told.pop("r3")) == ["request.completed", "request.parked"]
    assert told == {**completed, **others, "resp_1": ["response.incomplete"]}
    (both,) = [event for event in receiver.events.values() if event["data"]["id"] == "both"]
    assert both["data"]["answers"] == [
        {"id": "both", "status": "completed", "finish_reason": "stop", "error": None},
        {"id": "both~1", "status": "completed", "finish_reason": "length", "error": None},
    ]
    assert both["data"]["usage"] == {"prompt_tokens": 3, "completion_tokens": 2}
    (failed,) = [event for event in receiver.events.values() if event["type"] == "request.failed"]
    assert failed["data"]["answers"][0]["error"] == {"code": "bad", "message": "no"}


async def _seen(receiver: Receiver, num: int) -> bool:
    return len(receiver.events) >= num


async def _until_given_up(client: Client, receiver: Receiver, store: EventStore) -> None:
    """Deliver one event, while three receivers fail each in its own way until theirs are dead."""
    receiver.answers = {
        "/down": (500, {}),
        "/gone": (410, {}),
        "/moved": (302, {"location": receiver.url("/elsewhere")}),
    }
    for name in ("down", "gone", "moved", "fine"):
        await client.submit([1, 2], request_id=name, webhook_url=receiver.url(f"/{name}"))
        await client.cancel(name)

    async def ended() -> bool:
        return len(await store.list(EventState.DEAD)) == 3 and len(await store.list(EventState.DELIVERED)) == 1

    await until(ended, "events neither come nor are given up")
    by_path = {path: list(counts.values()) for path, counts in receiver.seen.items()}
    assert by_path == {"/down": [3], "/gone": [1], "/moved": [3], "/fine": [1]}


@pytest.mark.slow
async def test_a_refused_delivery_is_retried_then_abandoned_and_can_be_replayed(
    start: Start,
    client: Client,
    broker: Broker,
    receiver: Receiver,
    secrets: SecretStore,
    store: EventStore,
    redis_url: str,
    namespace: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    start(*OPTIONS)
    await _until_given_up(client, receiver, store)

    async def webhook(*arguments: str) -> str:
        where = ["--redis-url", redis_url, "--namespace", namespace]
        assert await asyncio.to_thread(penstock_cli.main, ["webhook", *arguments, *where]) == 0
        return capsys.readouterr().out

    dead = json.loads(await webhook("list", "--state", "dead", "--json"))
    assert {event["url"].rpartition("/")[2]: event["attempts"][-1]["error"] for event in dead} == {
        "down": "status 500",
        "gone": "status 410",
        "moved": "status 302",
    }
    (down,) = [event["event_id"] for event in dead if event["url"].endswith("/down")]
    assert [line.split()[1:3] for line in (await webhook("list")).splitlines()[1:]] == [
        ["request.cancelled", "delivered"],
        *[["request.cancelled", "dead"]] * 3,
    ]
    shown = await webhook("show", down)
    assert shown.count("status 500") == 3
    assert "request.cancelled" in shown
    # The receiver is well again, and has not heard of the new secret: the one before signs, too.
    receiver.answers = {}
    renewed = await webhook("secret", "rotate", "--tenant", "acme")
    assert renewed.strip() != receiver.secret
    await webhook("replay", down)

    async def replayed() -> WebhookEvent | None:
        event = await store.show(down)
        return event if event.state is EventState.DELIVERED else None

    await until(replayed, "a replayed event is not delivered")
    assert receiver.seen["/down"] == {down: 4}
    assert await webhook("purge", "--dead") == "2 purged\n"
    assert await store.list(EventState.DEAD) == []


async def test_undeliverable_webhooks_are_refused_at_submission(
    client: Client, commands: CommandConnection, namespace: str
) -> None:
    with pytest.raises(ValidationError, match="penstock webhook secret create --tenant acme"):
        await client.submit([1], webhook_url="https://example.com/hook")
    await SecretStore(commands, Keys(namespace)).create("acme")
    await commands.execute("SET", Keys(namespace).webhook_networks(), "[]")
    for url in ("http://10.1.2.3/", "http://localhost/", "http://[::1]/", "http://2130706433/"):
        with pytest.raises(ValidationError, match="not a public address"):
            await client.submit([1], webhook_url=url)
    with pytest.raises(ValidationError, match="needs a detached request"):
        await client.generate([1], webhook_url="https://example.com/hook")
    with pytest.raises(ValidationError, match="webhook_events"):
        await client.submit([1], webhook_url="https://example.com/hook", webhook_events="batch")


async def test_a_repeated_end_is_one_event_and_foreign_entries_are_dropped(
    commands: CommandConnection, namespace: str, store: EventStore
) -> None:
    keys = Keys(namespace)
    outbox = Outbox(commands, keys, store)
    target = WebhookTarget(url="https://example.com/hook", tenant="acme")
    command = outbox_command(keys, target, "batch.completed", {"id": "batch_1"}, ended_at=7.5)
    await commands.execute(*command)
    await commands.execute("XADD", keys.webhook_outbox(), "*", "who", "knows")
    await outbox.collect()
    await commands.execute(*command)
    await outbox.collect()
    (event,) = await store.list(EventState.PENDING)
    assert json.loads(event.body) == {
        "object": "event",
        "id": event.event_id,
        "type": "batch.completed",
        "created_at": 7,
        "data": {"id": "batch_1"},
    }
    assert await commands.execute("XLEN", keys.webhook_outbox()) == 0


async def test_answers_of_a_partly_accepted_request_are_not_mixed_with_the_next(
    client: Client, broker: Broker, receiver: Receiver, secrets: SecretStore, commands: CommandConnection
) -> None:
    url, params = receiver.url("/hook"), SamplingParams(n=2, max_tokens=1)
    # Of the first request one answer ends, as if the other had not been accepted; then its time passes.
    for first_to_end in ("both~1", "both"):
        await client.submit([1, 2], params, request_id="both", webhook_url=url)
        claims = await claim_all(broker, 2)
        await finish(broker, claims[first_to_end], FinishReason.STOP)
        assert await commands.execute("XLEN", broker.keys.outbox) == 0
        await commands.execute("DEL", broker.keys.request("both"), broker.keys.request("both~1"))


async def test_a_bad_parameter_of_a_webhook_is_named(client: Client) -> None:
    with pytest.raises(ValidationError, match="webhook_url"):
        await client.submit([1], webhook_url="example.com/hook")
    with pytest.raises(ValidationError, match="webhook_events"):
        await client.submit([1], webhook_events="response")
