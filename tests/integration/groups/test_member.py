"""What the worker process of a rank does, with a core that only listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from penstock.shared.connection import CommandConnection, Subscriber
from penstock.shared.deployment.groups import resize_group
from penstock.shared.errors import GroupSizeError
from penstock.shared.keys import Keys
from penstock.shared.messages.core import (
    GroupStatus,
    LeaveWave,
    Ready,
    SchedulerStats,
    StartWave,
    WavePhase,
    WaveStarted,
    WaveState,
)
from penstock.worker.config.data_parallel import RankPlace
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.config.worker_config import WorkerConfig
from penstock.worker.data_parallel.member import GroupMember

from ...processes import DEADLINE_S


class Core:
    def __init__(self) -> None:
        self.dead = asyncio.Event()
        self.told: list[StartWave | LeaveWave] = []
        self.end = ""

    def tell(self, message: StartWave | LeaveWave) -> None:
        self.told.append(message)

    def end_for(self, reason: str) -> None:
        self.end = reason
        self.dead.set()


class Rank:
    def __init__(self, config: WorkerConfig, commands: CommandConnection, subscriber: Subscriber) -> None:
        self.core = Core()
        self.standings: list[GroupStatus] = []
        self.member = GroupMember(config, commands, subscriber, self.core, self.standings.append)
        self.place: RankPlace | None = None

    async def start(self, ready: Ready) -> None:
        self.place = (await self.member.enter()).place
        await self.member.serve(ready)

    def is_at(self, wave: int, phase: WavePhase) -> None:
        self.member.record_wave(SchedulerStats(wave=WaveState(wave, phase)))


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


READY = Ready(
    model_folder="/m",
    architecture="A",
    max_model_len=8,
    num_blocks=1,
    block_size=1,
    dtype="float32",
    device="cpu",
    vocab_size=8,
    eos_token_ids=[],
    num_shared_experts=8,
)


@pytest.fixture
async def make(commands: CommandConnection, redis_url: str, namespace: str) -> AsyncIterator[Callable[[str], Any]]:
    made: list[tuple[Rank, Subscriber]] = []

    async def make(name: str) -> Rank:
        engine = EngineConfig(
            model="m", data_parallel_size=2, data_parallel_group="g", data_parallel_address="127.0.0.1"
        )
        config = WorkerConfig(
            worker_id="w", engine_id=name, redis_url=redis_url, engine=engine, namespace=namespace, lease_ttl_s=6
        )
        subscriber = Subscriber(redis_url)
        await subscriber.open()
        made.append((Rank(config, commands, subscriber), subscriber))
        return made[-1][0]

    yield make
    for rank, subscriber in made:
        await rank.member.close()
        await subscriber.close()


async def pair(make: Callable[[str], Any]) -> tuple[Rank, Rank]:
    first, second = await make("a"), await make("b")
    await asyncio.gather(first.start(READY), second.start(READY))
    return (first, second) if first.place.rank == 0 else (second, first)


async def test_both_learn_their_places_and_one_address(make: Callable[[str], Any]) -> None:
    first, second = await pair(make)
    assert first.place is not None
    assert second.place is not None
    assert (first.place.rank, second.place.rank) == (0, 1)
    assert first.place.address == second.place.address
    assert first.place.address.startswith("127.0.0.1:")
    assert first.standings[-1] == GroupStatus("g", first.place.generation, 0, 2)


async def test_group_sizes_are_checked_against_the_number_of_experts(
    make: Callable[[str], Any], commands: CommandConnection, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later sizes are checked against it, although each rank has sent only a lease renewal before."""
    renew, renewed = GroupMember._renew, list[GroupMember]()

    async def noted(member: GroupMember, place: Any) -> None:
        await renew(member, place)
        renewed.append(member)

    monkeypatch.setattr(GroupMember, "_renew", noted)
    ranks = [await make("a"), await make("b")]
    await asyncio.gather(*(rank.member.enter() for rank in ranks))
    await until(lambda: len(renewed) == 2)
    await asyncio.gather(*(rank.member.serve(READY) for rank in ranks))
    with pytest.raises(GroupSizeError, match="3 does not divide the 8 experts"):
        await resize_group(commands, Keys(namespace).model("m"), "g", 3)


async def test_a_wave_is_announced_until_all_ranks_have_joined(make: Callable[[str], Any]) -> None:
    first, second = await pair(make)
    second.is_at(3, WavePhase.STARTING)
    await until(lambda: first.core.told.count(StartWave(3)) >= 3)
    second.is_at(3, WavePhase.RUNNING)
    second.is_at(4, WavePhase.STARTING)
    await until(lambda: StartWave(4) in first.core.told)
    assert StartWave(3) not in first.core.told[first.core.told.index(StartWave(4)) :]
    assert second.standings[-1].wave == 4


async def test_a_wave_of_another_generation_is_nobodys(
    make: Callable[[str], Any], commands: CommandConnection, namespace: str
) -> None:
    first, second = await pair(make)
    assert second.place is not None
    channel = Keys(namespace).model("m").group_waves("g")
    for data in (b"\xc1", msgspec.msgpack.encode(WaveStarted(second.place.generation - 1, 9))):
        await commands.execute("PUBLISH", channel, data)
    second.is_at(1, WavePhase.STARTING)
    await until(lambda: StartWave(1) in first.core.told)
    assert StartWave(9) not in first.core.told


async def test_a_core_is_ended_when_the_generation_is_over(make: Callable[[str], Any]) -> None:
    first, second = await pair(make)
    await second.member.close()  # its core has died
    await until(first.core.dead.is_set)
    assert "has exited" in first.core.end


async def test_whoever_leaves_waits_for_the_end_of_the_wave_and_for_the_others(make: Callable[[str], Any]) -> None:
    first, _ = await pair(make)
    first.is_at(1, WavePhase.RUNNING)
    leaving = asyncio.create_task(first.member.leave(DEADLINE_S, asyncio.Event()))
    await asyncio.sleep(0)
    assert first.core.told == []
    first.is_at(2, WavePhase.IDLE)
    await until(lambda: LeaveWave() in first.core.told)
    assert not leaving.done()
    first.is_at(3, WavePhase.LEFT)
    await leaving
    assert first.member.has_left.is_set()
