"""Chaos leaves nothing half done when it ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.ops.lab.chaos.disturber import Disturber
from penstock.ops.lab.chaos.pace import EveryFewSeconds
from penstock.ops.lab.chaos.recovery_clock import RecoveryClock
from penstock.ops.local.stack import LocalStack

from ...redis_server import RedisServer


async def limit(server: RedisServer) -> bytes:
    found = await asyncio.to_thread(server.execute, "CONFIG", "GET", "maxmemory")
    if not isinstance(found, dict):
        return found[1]
    ((name, value),) = found.items()  # of text or of bytes, as the release of redis-py likes
    assert name in ("maxmemory", b"maxmemory")
    return value.encode() if isinstance(value, str) else value


async def test_a_filled_redis_is_emptied_after_cancellation_at_any_time(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = SimpleNamespace(url=server.url, server_urls={"home": server.url}, shards={}, workers=[])
    disturber = Disturber(cast(LocalStack, servers), 1, EveryFewSeconds(0.01), RecoveryClock())
    trouble = disturber._redis
    monkeypatch.setattr(disturber, "_actions", {"fill redis": trouble.actions["fill redis"]})
    tell, is_full, gate = trouble._run_commands, asyncio.Event(), asyncio.Event()

    async def held_tell(name: str, *commands: tuple[str | int, ...]) -> list[Any]:
        """The server has done it, and the reply is on its way for as long as the gate is shut."""
        replies = await tell(name, *commands)
        is_full.set()
        await gate.wait()
        return replies

    monkeypatch.setattr(trouble, "_run_commands", held_tell)
    disturbing = asyncio.create_task(disturber.run())
    await is_full.wait()
    assert await limit(server) == b"1"
    disturbing.cancel()
    asyncio.get_running_loop().call_soon(gate.set)
    with pytest.raises(asyncio.CancelledError):
        await disturbing
    assert await limit(server) == b"0"


def test_data_lost_in_a_swap_is_the_requested_loss() -> None:
    servers = SimpleNamespace(url="", server_urls={"home": ""}, shards={}, workers=[])
    disturber = Disturber(cast(LocalStack, servers), 1, EveryFewSeconds(0.01), RecoveryClock(), loses_data=True)
    disturber.events["lose data in a swap"] += False
    assert disturber.missing == ["lose data"]
    disturber.events["lose data in a swap"] += True
    assert disturber.missing == []


def test_a_requested_action_that_has_not_happened_is_chosen_half_of_the_time() -> None:
    servers = SimpleNamespace(url="", server_urls={"home": ""}, shards={}, workers=[])
    disturber = Disturber(cast(LocalStack, servers), 1, EveryFewSeconds(0.01), RecoveryClock(), loses_data=True)
    for is_late in (False, True):
        disturber.events["kill core"] = 3 * is_late
        chosen = [disturber._choose() for _ in range(200)]
        assert (chosen.count("lose data") > 90) == is_late


def test_a_run_goes_on_until_something_was_killed_and_each_requested_action_has_happened() -> None:
    servers = SimpleNamespace(url="", server_urls={"home": ""}, shards={}, workers=[])
    disturber = Disturber(cast(LocalStack, servers), 1, EveryFewSeconds(0.01), RecoveryClock(), loses_data=True)
    assert disturber.has_shown(0)
    disturber.events["stop host"] = 4
    assert not disturber.has_shown(3)
    disturber.events["lose data"] += 1
    assert not disturber.has_shown(3)
    disturber.events["kill core"] += 1
    assert disturber.has_shown(3)
    assert not disturber.has_shown(7)
    del disturber.events["lose data"]
    disturber.events["stop host"] = 11
    assert disturber.has_shown(3)
