"""One tenant's trouble is that tenant's alone: names that do not resolve, receivers that do not answer, backlogs."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.producer.background.agenda import Agenda
from penstock.producer.background.concurrency import TenantSlots
from penstock.producer.batches import BatchStore
from penstock.producer.jobs.context import JobContext
from penstock.producer.jobs.due_jobs import PAUSE_WITHOUT_PLACE_S, run_open_batch
from penstock.producer.jobs.settings import JobSettings
from penstock.producer.webhooks import guarded_http as resolver_module
from penstock.producer.webhooks.delivery import MAX_PER_TENANT, PAUSE_WHILE_BUSY_S, Delivery, Sender
from penstock.producer.webhooks.event_store import EventStore
from penstock.producer.webhooks.events import WebhookEvent
from penstock.producer.webhooks.guarded_http import MAX_PER_OWNER, Resolver, UnresolvedNameError
from penstock.producer.webhooks.secrets import SecretStore
from penstock.producer.webhooks.settings import WebhookSettings
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys
from penstock.shared.tracing.tracing import open_tracing

from ...processes import DEADLINE_S
from ..batches.conftest import ENDPOINT, parts, row
from .processes import until
from .receiver import Receiver
from .test_sender import Server

LOOPBACK = ("127.0.0.0/8",)
LONG_S = 600.0


class DeadNames:
    """Name servers that do not answer for names that begin with "dead", until ``answer`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer = threading.Event()
        self.asked: list[str] = []
        self._resolve = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._getaddrinfo)

    def _getaddrinfo(self, host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if str(host).startswith("dead"):
            self.asked.append(host)
            self.answer.wait(LONG_S)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self._resolve("127.0.0.1" if str(host).endswith(".test") else host, port, *args, **options)

    async def until_asked(self, num: int) -> None:
        async def are_asked() -> bool:
            return len(self.asked) >= num

        await until(are_asked, "the names are not looked up")


@pytest.fixture
def dead_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeadNames]:
    names = DeadNames(monkeypatch)
    yield names
    names.answer.set()


async def test_dead_names_of_one_tenant_hold_up_no_other(dead_names: DeadNames) -> None:
    """There are more of them than the event loop has threads."""
    sender = await asyncio.to_thread(Sender, WebhookSettings(allowed_networks=LOOPBACK, timeout_s=LONG_S))
    async with Server(b"HTTP/1.1 204 No Content\r\n\r\n") as server:
        posts = [
            asyncio.create_task(sender.post(f"http://dead-{number}.test/", {}, "{}", tenant="bad"))
            for number in range(50)
        ]
        await dead_names.until_asked(MAX_PER_OWNER)
        async with asyncio.timeout(DEADLINE_S):
            reply = await sender.post(f"http://alive.test:{server.port}/", {}, "{}", tenant="good")
            # Nor do they hold up what else uses the loop's threads.
            await asyncio.to_thread(len, "")
        assert reply.status == 204
        assert len(dead_names.asked) == MAX_PER_OWNER
        dead_names.answer.set()
        async with asyncio.timeout(DEADLINE_S):
            errors = await asyncio.gather(*posts, return_exceptions=True)
        assert {type(error) for error in errors} == {socket.gaierror}
    await sender.close()


async def test_a_name_is_resolved_once_within_the_time_limit(dead_names: DeadNames) -> None:
    resolver = Resolver(0.05)
    for _ in range(3):
        with pytest.raises(UnresolvedNameError, match=r"'dead\.test' was not resolved within 0\.05 s"):
            await resolver.resolve("dead.test", 80, "acme")
    assert dead_names.asked == ["dead.test"]


async def test_owners_take_turns_and_cancelled_lookups_are_skipped(
    dead_names: DeadNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolver_module, "MAX_THREADS", 1)
    resolver = Resolver(LONG_S)

    def look_up(name: str, owner: str) -> asyncio.Task[Any]:
        return asyncio.create_task(resolver.resolve(name, 80, owner))

    lookups = [look_up("dead-a1", "a"), look_up("dead-a2", "a"), look_up("dead-a3", "a"), look_up("dead-b1", "b")]
    await dead_names.until_asked(1)
    lookups[1].cancel()
    await asyncio.gather(lookups[1], return_exceptions=True)
    dead_names.answer.set()
    await asyncio.gather(*lookups, return_exceptions=True)
    assert dead_names.asked == ["dead-a1", "dead-a3", "dead-b1"]


def test_a_slot_is_left_for_a_new_tenant() -> None:
    slots = TenantSlots(12, 5)
    held: list[Any] = []

    def take(tenant: str) -> bool:
        held.append(slots.occupy(tenant))
        return held[-1].__enter__()

    assert [take("a") for _ in range(6)] == [True] * 5 + [False]
    assert [take("b") for _ in range(5)] == [True] * 4 + [False]
    assert [take("c") for _ in range(4)] == [True] * 3 + [False]
    assert not take("d")  # all twelve are taken
    for one in held:
        one.__exit__(None, None, None)
    assert take("d")


async def test_a_receiver_that_does_not_answer_takes_places_of_its_tenant_alone(
    commands: CommandConnection, namespace: str, receiver: Receiver
) -> None:
    keys = Keys(namespace)
    store, secrets = EventStore(commands, keys, Agenda(commands, keys)), SecretStore(commands, keys)
    receiver.secret = (await secrets.create("bad")).current

    async def make(tenant: str, number: int, path: str, host: str) -> str:
        event_id = f"evt_{tenant}_{number}"
        event = WebhookEvent(
            event_id=event_id,
            type="batch.completed",
            url=receiver.url(path, host),
            tenant=tenant,
            created_at=1.0,
            body=f'{{"id": "{event_id}"}}',
        )
        await store.create(event)
        return event_id

    settings = WebhookSettings(allowed_networks=LOOPBACK, timeout_s=LONG_S)
    delivery = await asyncio.to_thread(Delivery, commands, keys, store, settings, 100)
    # The same receiver under several names, so that the limit of each name is not reached.
    hosts = ["127.0.0.1", "localhost", "127.1", "2130706433"]
    events = [await make("bad", number, "/held", hosts[number % 4]) for number in range(60)]
    deliveries = [asyncio.create_task(delivery.deliver(event)) for event in events]

    async def are_held() -> bool:
        return sum(task.done() for task in deliveries) == 60 - MAX_PER_TENANT

    await until(are_held, "a tenant has more or less places than it should")
    assert all((task.result() or 0.0) > PAUSE_WHILE_BUSY_S - 0.1 for task in deliveries if task.done())

    receiver.secret = (await secrets.create("good")).current
    async with asyncio.timeout(DEADLINE_S):
        assert await delivery.deliver(await make("good", 0, "/hook", "127.0.0.1")) is None
    assert list(receiver.seen["/hook"]) == ["evt_good_0"]
    receiver.released.set()
    await asyncio.gather(*deliveries)
    await delivery.close()


async def test_newly_due_jobs_are_visible_after_a_backlog(commands: CommandConnection, namespace: str) -> None:
    keys = Keys(namespace)
    agenda = Agenda(commands, keys)
    seconds, _ = await commands.execute("TIME")
    backlog = [(1000 * (int(seconds) - 100) + number, f"deliver:old-{number:03}") for number in range(100)]
    await commands.execute("ZADD", keys.jobs_due(), *(part for item in backlog for part in item))
    await agenda.add("deliver", "new")
    items = [item.item_id for item in await agenda.due(10)]
    assert items == [f"old-{n:03}" for n in (0, 1, 2, 3, 4, 96, 97, 98, 99)] + ["new"]
    assert len(await agenda.due(101)) == 101


async def test_batches_of_one_tenant_do_not_take_all_places(redis_url: str, namespace: str, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    settings = JobSettings(redis_url=redis_url, namespace=namespace, max_jobs=8, files_dir=str(folder))
    context = await asyncio.to_thread(JobContext, settings, open_tracing(None, "test"))
    await context.open()
    try:
        async with BatchStore(redis_url, folder, namespace=namespace) as store:
            file = await store.files.create(parts(row(0)), filename="in.jsonl", tenant="acme")
            batch = await store.create(input_file_id=file.id, endpoint=ENDPOINT, tenant="acme")
        with context.batch_slots.occupy("acme"), context.batch_slots.occupy("acme"):
            assert await run_open_batch(context, batch.id) == PAUSE_WITHOUT_PLACE_S
        # The model that it names is known to nobody, so it has an end at once.
        assert await run_open_batch(context, batch.id) is None
    finally:
        await context.close()
