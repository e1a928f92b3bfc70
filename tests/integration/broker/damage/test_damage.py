"""Records in Redis that others than the scripts write to: a request that is damaged ends, and nothing else suffers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import pytest

from penstock.shared.broker import Broker, DeadLetter, Entry, Queue
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import DamagedRecordError
from penstock.shared.messages.outcome import FinishReason, TokenLogprobs

from ..conftest import CAUSE, TTL_MS, assert_nothing_is_left, die, enqueue, final, held, record, take

VALUES = ("", "x", "nan", "-1", "1e400")
ENDED = {"finished", "cancelled", "expired", "parked"}


class Scene:
    """Victims that wait, run, or wait again, each damaged in a way of its own, and their neighbours."""

    def __init__(self, commands: CommandConnection, broker: Broker, queue: Queue) -> None:
        self.commands, self.broker, self.queue = commands, broker, queue
        self.damage_of: dict[str, str] = {}
        self.neighbours: set[str] = set()

    @property
    def victims(self) -> list[str]:
        return list(self.damage_of)

    async def begin(self, stage: str) -> None:
        ways = await self._ways(stage)
        self.damage_of = {f"victim{number}": str(way) for number, way in enumerate(ways)}
        await self._enqueue(self.victims)
        if stage != "queued":
            claims = await take(self.broker, "e0", len(ways))
            assert await self.broker.append([record(claim.request_id, 1, 0, 7, 8) for claim in claims]) == []
        if stage == "returned":
            assert await self.broker.release([held(victim, 1) for victim in self.victims]) == len(ways)
        await self._enqueue(["behind"])
        await self._enqueue(["other"], tenant="u")
        self.neighbours = {"behind", "other"}
        for victim, (command, kind, *rest) in zip(self.victims, ways, strict=True):
            key = f"{self.broker.keys.prefix}{kind}:{victim}"
            if rest and rest[0] == "another type":
                await self.commands.execute("DEL", key)
                rest = ["x"] if command == "SET" else ["x", "x"]
            await self.commands.execute(command, key, *rest)

    async def _ways(self, stage: str) -> list[tuple[str, ...]]:
        """Every way in which the record of a request can be damaged: command, kind of key, and the rest."""
        await self._enqueue(["probe"])
        fields = {field.decode() for field in await self._fields("probe")}
        await take(self.broker, "e0", 1)
        await self.broker.release([held("probe", 1)])
        fields |= {field.decode() for field in await self._fields("probe")}
        await take(self.broker, "e0", 1)
        fields |= {field.decode() for field in await self._fields("probe")}
        await self.broker.cancel("probe")
        ways: list[tuple[str, ...]] = [
            ("HSET", "request", field, value) for field in sorted(fields) for value in VALUES
        ]
        ways += [("HDEL", "request", field) for field in sorted(fields)]
        ways += [("SET", "request", "another type"), ("SET", "log", "another type")]
        ways.append(("DEL", "request"))
        if stage != "queued":
            ways += [("HSET", "payload", "another type"), ("DEL", "payload")]
        return ways

    async def _fields(self, request_id: str) -> Sequence[bytes]:
        return await self.commands.execute("HKEYS", self.broker.keys.request(request_id))

    async def _enqueue(self, request_ids: Sequence[str], tenant: str = "t") -> None:
        await self.broker.enqueue_many(
            [
                Entry(
                    request_id=request_id,
                    payload=b"payload",
                    result_ttl_ms=TTL_MS,
                    tenant=tenant,
                    num_prompt_tokens=3,
                    max_tokens=4,
                    client_id="c",
                    client_ttl_ms=600_000,
                    timeout_ms=600_000,
                    call="call",
                    webhook="w",
                    fail_fast=False,
                )
                for request_id in request_ids
            ]
        )

    async def serve_all(self) -> set[str]:
        """Serve what there is, as an engine does that claims, writes, and hands back what is refused."""
        served: set[str] = set()
        for _ in range(1000):
            claims = await take(self.broker, "e1", 400)
            if not claims:
                return served
            ends = [final(claim.request_id, claim.epoch, claim.num_logged_tokens, 1) for claim in claims]
            refused = set(await self.broker.finish(ends))
            await self.broker.release([(one.request_id, one.epoch) for one in claims if one.request_id in refused])
            served |= {claim.request_id for claim in claims} - refused
        raise AssertionError("the same requests are claimed again and again")

    async def make_due(self) -> None:
        for victim in self.victims:
            await self.commands.execute("ZADD", self.broker.keys.prefix + "deadlines", "XX", 1, victim)
        await self.broker.expire(grace_ms=0)


async def _reap(scene: Scene) -> None:
    keys = scene.broker.keys
    await scene.broker.reap(CAUSE, max_deliveries=3, lease_ttl_ms=1)
    await scene.commands.execute("HSET", keys.prefix + "reaper", "not_before", 0)
    await scene.commands.execute("ZADD", keys.leases, "XX", 0, "e0")
    await scene.commands.execute("ZADD", keys.clients, "XX", 0, "c")
    scene.neighbours = set()  # their client is dead as well
    await scene.broker.reap(CAUSE, max_deliveries=3)


async def _write(scene: Scene) -> None:
    await scene.broker.append([record(victim, 1, 2, 9) for victim in scene.victims])
    refused = await scene.broker.finish([final(victim, 1, 3) for victim in scene.victims])
    await scene.broker.release([held(victim, 1) for victim in refused])


async def _show(scene: Scene) -> None:
    for victim in scene.victims:
        with suppress(DamagedRecordError):
            await scene.queue.status(victim)
    await scene.queue.stats(tenants=True)


async def _purge(scene: Scene) -> None:
    await scene.queue.purge("t")
    scene.neighbours.discard("behind")


async def _each(scene: Scene, action: Callable[[str], Awaitable[object]]) -> None:
    for victim in scene.victims:
        await action(victim)


ACTIONS: dict[str, Callable[[Scene], Awaitable[object]]] = {
    "claim": lambda scene: take(scene.broker, "e2", 400),
    "cancel": lambda scene: _each(scene, scene.broker.cancel),
    "leave": lambda scene: _each(scene, lambda victim: scene.broker.leave(victim, 600_000)),
    "purge": _purge,
    "reclaim": lambda scene: die(scene.broker, "e0", external=False),
    "reap": _reap,
    "expire": lambda scene: scene.make_due(),
    "release": lambda scene: scene.broker.release([held(victim, 1) for victim in scene.victims]),
    "renew": lambda scene: scene.broker.renew("e0", [held(victim, 1) for victim in scene.victims]),
    "write": _write,
    "show": _show,
    "pause": lambda scene: scene.queue.pause(put_back=True),
    "abort": lambda scene: scene.queue.pause(put_back=False, abort=True),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("stage", ["queued", "claimed", "returned"])
async def test_a_damaged_request_ends_once_and_others_are_served(
    broker: Broker, queue: Queue, commands: CommandConnection, stage: str, action: str
) -> None:
    scene = Scene(commands, broker, queue)
    await scene.begin(stage)
    await ACTIONS[action](scene)
    await queue.resume()
    # Whoever holds something now dies: engines come and go, and none of that may raise either.
    for engine in ("e0", "e2"):
        await die(broker, engine, external=True)
    assert scene.neighbours <= await scene.serve_all()
    for victim, damage in scene.damage_of.items():
        ends = [delta for delta in await broker.read_log(victim) if delta.finished]
        assert len(ends) == 1, damage
        if ends[0].finish_reason is FinishReason.ERROR:
            assert ends[0].error is not None, damage
            assert ends[0].error.code == "damaged_record", damage
        assert await broker.state(victim) in ENDED, damage
    await _take_away_what_stays(scene)
    await assert_nothing_is_left(commands, broker)


async def test_a_damaged_suspect_does_not_keep_others_from_an_idle_engine(
    broker: Broker, commands: CommandConnection
) -> None:
    await enqueue(broker, "suspect")
    await take(broker, "e0", 1)
    await die(broker, "e0", external=False)
    prefix = broker.keys.prefix
    assert await commands.execute("LRANGE", prefix + "suspects", 0, -1) == [b"suspect"]
    # So long ago that an engine would drain for it.
    await commands.execute("HSET", prefix + "request:suspect", "suspected_at", 1)
    await commands.execute("DEL", prefix + "payload:suspect")
    await enqueue(broker, "behind")
    assert [claim.request_id for claim in await take(broker, "e1", 4)] == ["behind"]


async def test_a_damaged_parked_request_is_listed_and_can_be_purged(
    broker: Broker, commands: CommandConnection
) -> None:
    dead_letter, key = DeadLetter(commands, broker.keys), broker.keys.parked("a")
    await enqueue(broker, "a")
    (claim,) = await take(broker, "e0", 1)
    assert await broker.park(claim, CAUSE, "validation_error", "unreadable")
    for field in await commands.execute("HKEYS", key):
        for value in VALUES:
            sound = await commands.execute("HGET", key, field)
            await commands.execute("HSET", key, field, value)
            assert [dead.request_id for dead in await dead_letter.list()] == ["a"]
            await commands.execute("HSET", key, field, sound)
    for field in await commands.execute("HKEYS", key):
        await commands.execute("HDEL", key, field)
        if await commands.execute("EXISTS", key):
            assert [dead.request_id for dead in await dead_letter.list()] == ["a"]
    await commands.execute("SET", key, "x")
    assert [dead.request_id for dead in await dead_letter.list()] == ["a"]
    assert not await dead_letter.replay("a")
    assert await dead_letter.purge("a")
    assert await dead_letter.list() == []


@pytest.mark.parametrize("num_tokens", [1, 20, 70_000])
async def test_a_sound_log_is_taken_for_one_whatever_is_in_it(broker: Broker, num_tokens: int) -> None:
    await enqueue(broker, "a")
    await take(broker, "e0", 1)
    written = record("a", 1, 0, *range(num_tokens))
    written.delta.logprobs = [TokenLogprobs(1, -0.5, 1, [(3, -0.75)], [b"\xff", b"b"])]
    written.delta.first_prompt_token = (1, b"\xff")
    assert await broker.append([written]) == []
    assert await broker.release([held("a", 1)]) == 1
    (claim,) = await take(broker, "e0", 1)
    assert claim.num_logged_tokens == num_tokens


async def _take_away_what_stays(scene: Scene) -> None:
    """Remove what is for operators and for clients that live by their lease, and what goes when its time has come."""
    await scene.make_due()
    dead_letter = DeadLetter(scene.commands, scene.broker.keys)
    for dead in await dead_letter.list():
        await dead_letter.purge(dead.request_id)
    kept = ["client:c", *(f"client:left:{victim}" for victim in scene.victims), "clients", "outbox"]
    await scene.commands.execute("DEL", *(scene.broker.keys.prefix + name for name in kept))
