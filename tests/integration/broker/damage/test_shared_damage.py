"""What all requests of a model share, written to by others than the scripts: it is put right, and the queue goes on."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from penstock.shared.broker import Broker, DeadLetter, Homes, Queue
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import ModelBrokenError
from penstock.shared.keys import Keys
from penstock.shared.queue.policy import QueuePolicy, TenantPolicy
from penstock.shared.swap.views import SleepLevel

from ....processes import DEADLINE_S
from ..conftest import CAUSE, die, enqueue, final, held, record, take
from ..snapshot import read_snapshot

VALUES = ("", "x", "nan", "-1", "1e400", "999999999999999999999")
POLICIES = ("", "x", "5", '{"bands": 3}', '{"bands": ["a"], "default_band": "b"}', '{"tenant": {"weight": "x"}}')
TENANT_POLICIES = ("", "x", "5", '{"weight": "x"}', '{"max_queue_depth": {}}')
# What is held there and nowhere else is lost with the key; all that comes after it is served.
HOLDING = ("lane", "returned", "suspects")
OF_REQUESTS = ("request", "log", "payload", "parked", "input")


class Scene:
    """A model in the middle of its work: requests wait, run and wait again; quotas count, somebody is over one."""

    def __init__(self, commands: CommandConnection, namespace: str, model: str) -> None:
        self.commands = commands
        self.keys = Keys(namespace).model(model)
        self.broker, self.queue = Broker(commands, self.keys), Queue(commands, self.keys)
        self.dead_letter = DeadLetter(commands, self.keys)
        self.homes = Homes(commands, self.keys)

    async def begin(self) -> None:
        limits = TenantPolicy(
            requests_per_minute=1000, tokens_per_minute=10_000, max_concurrent_requests=50, weight=2.0
        )
        await self.queue.configure(QueuePolicy(max_queue_tokens=100_000))
        await self.queue.configure_tenant("t", limits)
        await self.queue.configure_tenant("slow", TenantPolicy(requests_per_minute=1))
        await enqueue(self.broker, "ended", "running", "handed", **self.options)
        await enqueue(self.broker, "slow1", "slow2", **(self.options | {"tenant": "slow"}))
        for claim in await take(self.broker, "e0", 9):
            await self.broker.append([record(claim.request_id, claim.epoch, 0, 7)])
        await self.broker.finish([final("ended", 1, 1, 8)])
        await self.broker.release([held("handed", 1)])
        await enqueue(self.broker, "waiting", fail_fast=True, **self.options)
        await self.homes.renew("d0", SleepLevel.DISK, 1.0, lease_ttl_ms=600_000)
        await self.homes.renew("d2", SleepLevel.DISK, 1.0, error=ModelBrokenError("no file"), lease_ttl_ms=600_000)
        await self.homes.request_grant("d0", 1.0, num_engines=2, lease_ttl_ms=600_000)
        await self.broker.reap(CAUSE, max_deliveries=3)

    @property
    def options(self) -> dict[str, object]:
        return {"tenant": "t", "num_prompt_tokens": 3, "max_tokens": 4, "client_id": "c", "client_ttl_ms": 600_000}

    async def damages(self) -> list[tuple[str, ...]]:
        """Every way in which a key can be damaged: command, the key after the prefix, and the rest."""
        found = await read_snapshot(self.commands, self.keys)
        ways: list[tuple[str, ...]] = []
        for kind in sorted(found.kinds - set(OF_REQUESTS)):
            for name, value in found.of(kind).items():
                key = f"{kind}:{name}" if name else kind
                ways.append(("HSET", key, "x", "x") if isinstance(value, bytes) else ("SET", key, "x"))
                if await self.commands.execute("TYPE", self.keys.prefix + key) == b"hash":
                    values = TENANT_POLICIES if kind == "tenants" else VALUES
                    ways += [("HSET", key, str(field), told) for field, told in itertools.product(value, values)]
        ways += [("SET", "policy", policy) for policy in POLICIES]
        return ways

    async def damage(self, way: tuple[str, ...]) -> None:
        command, key, *rest = way
        if command == "SET" or rest[0] == "x":
            await self.commands.execute("DEL", self.keys.prefix + key)
        await self.commands.execute(command, self.keys.prefix + key, *rest)

    async def go_on(self) -> set[str]:
        """Do all that clients, engines, supervisors and operators do; returns what was served."""
        await self.queue.stats(tenants=True)
        await enqueue(self.broker, "new", **self.options)
        await self.broker.renew("e0", [held("running", 1)])
        await self.broker.renew_client("c", 600_000)
        served = await self.serve("e1")
        await self.broker.claims("e0")
        await self.broker.append([record("running", 1, 1, 9)])
        await self.homes.renew("d0", SleepLevel.DISK, 1.0, lease_ttl_ms=600_000)
        await self.homes.request_grant("d0", 1.0, num_engines=2, lease_ttl_ms=600_000)
        await self.broker.reap(CAUSE, max_deliveries=3)
        await self.broker.expire()
        await self.queue.status("running")
        await self.homes.demand()
        await self.homes.request_grant("d1", 2.0)
        await self.queue.pause(put_back=True)
        await self.queue.resume()
        await die(self.broker, "e0", external=True)
        await self.dead_letter.list()
        served |= await self.serve("e2")
        await self.queue.configure_tenant("slow", None)
        served |= await self.serve("e2")
        await enqueue(self.broker, "purged", **self.options)
        await self.broker.cancel("handed")
        await self.queue.purge("t")
        await self.queue.policy()
        await self.queue.tenant_policies()
        await self.queue.configure(QueuePolicy())
        await self.broker.withdraw("e1")
        await enqueue(self.broker, "last", **self.options)
        # What a script that stopped half-way has handed out unseen, its engine hands back.
        for engine in ("e1", "e2"):
            await die(self.broker, engine, external=True)
        async with asyncio.timeout(DEADLINE_S):
            while "last" not in served:  # an engine leaves it to the others for a moment
                served |= await self.serve("e3")
        return served

    async def serve(self, engine: str) -> set[str]:
        claims = await take(self.broker, engine, 20)
        refused = await self.broker.finish(
            [final(one.request_id, one.epoch, one.num_logged_tokens, 1) for one in claims]
        )
        return {one.request_id for one in claims} - set(refused)


@pytest.mark.parametrize("part", range(4))
async def test_a_queue_keeps_serving_after_any_damage(commands: CommandConnection, namespace: str, part: int) -> None:
    probe = Scene(commands, namespace, "probe")
    await probe.begin()
    for number, way in enumerate((await probe.damages())[part::4]):
        scene = Scene(commands, namespace, f"m{number}")
        await scene.begin()
        try:
            await scene.damage(way)
            served = await scene.go_on()
            wanted = {"new", "last"} | (set() if way[1].startswith(HOLDING) else {"waiting"})
            assert wanted <= served
            stats = await scene.queue.stats()
            assert (stats.depth, stats.num_running) == (0, 0)
        except BaseException as error:
            error.add_note(f"after {way}")
            raise
