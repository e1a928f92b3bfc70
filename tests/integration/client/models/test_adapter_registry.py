"""Names of adapters in Redis: what they point to, whose they are, and what changes at once or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.shared.connection import CommandConnection
from penstock.shared.errors import UnknownAdapterError, ValidationError
from penstock.shared.keys import Keys
from penstock.shared.lora.registry import AdapterRecord, AdapterRegistry
from penstock.shared.shards import make_pair


@pytest.fixture
async def registry(redis_url: str, namespace: str) -> AsyncIterator[AdapterRegistry]:
    connection, _ = make_pair(redis_url)
    yield AdapterRegistry(connection, Keys(namespace))
    await connection.close()


def record(name: str = "cats", digest: str = "c", **fields: Any) -> AdapterRecord:
    given: dict[str, Any] = {"model": "m", "path": f"/adapters/{digest}", "rank": 8} | fields
    return AdapterRecord(name=name, digest=digest * 64, **given)


async def test_a_registered_adapter_is_read_back_by_its_name(registry: AdapterRegistry) -> None:
    written = record(target_modules=("k_proj", "q_proj"), num_bytes=7, base_model_name="base", added_at=1.5)
    made, former = await registry.register(written)
    assert (made.number, former) == (1, None)
    assert await registry.find("cats", "acme") == made
    request = made.request()
    assert (request.lora_name, request.lora_int_id, request.lora_path) == ("cats", 1, "/adapters/c")
    assert (request.digest, request.base_model_name) == ("c" * 64, "base")


async def test_a_name_may_be_moved_to_another_adapter_and_numbers_belong_to_adapters(registry: AdapterRegistry) -> None:
    first, _ = await registry.register(record())
    second, former = await registry.register(record(digest="d"))
    assert former == first
    assert (first.number, second.number) == (1, 2)
    again, _ = await registry.register(record("other", digest="d"))
    assert again.number == 2
    assert await registry.find("cats", "t") == second


async def test_an_adapter_of_a_tenant_hides_the_shared_one_and_is_private(registry: AdapterRegistry) -> None:
    common, _ = await registry.register(record())
    own, _ = await registry.register(record(digest="d", tenant="acme"))
    await registry.register(record("secret", digest="e", tenant="acme"))
    assert await registry.find("cats", "acme") == own
    assert await registry.find("cats", "other") == common
    assert await registry.find("secret", "other") is None
    assert [one.digest[0] for one in await registry.visible("acme")] == ["d", "e"]
    assert [one.digest[0] for one in await registry.visible("other")] == ["c"]
    assert len(await registry.read()) == 3
    assert await registry.read("another model") == []


async def test_a_name_is_one_models(registry: AdapterRegistry) -> None:
    await registry.register(record())
    with pytest.raises(ValidationError, match="is that of an adapter of model 'm' already"):
        await registry.register(record(digest="d", model="n"))
    assert (await registry.read())[0].digest == "c" * 64


async def test_a_number_is_one_adapters(registry: AdapterRegistry) -> None:
    made, _ = await registry.register(record(), wanted_number=3)
    assert made.number == 3
    with pytest.raises(ValidationError, match="lora_int_id 3 is that of another adapter"):
        await registry.register(record("dogs", digest="d"), wanted_number=3)
    with pytest.raises(ValidationError, match="lora_int_id of this adapter is 3 already, got 4"):
        await registry.register(record("dogs"), wanted_number=4)
    drawn = [(await registry.register(record(name, digest=name[0])))[0].number for name in ("a", "b", "d", "e")]
    assert drawn == [1, 2, 4, 5]


async def test_a_removed_name_is_unknown_and_the_number_ends_with_the_last_name(registry: AdapterRegistry) -> None:
    await registry.register(record(), wanted_number=3)
    await registry.register(record("again"))
    assert (await registry.remove("cats", "")).name == "cats"
    assert await registry.find("cats", "t") is None
    with pytest.raises(ValidationError, match="lora_int_id 3 is that of another"):
        await registry.register(record("dogs", digest="d"), wanted_number=3)
    await registry.remove("again", "")
    made, _ = await registry.register(record("dogs", digest="d"), wanted_number=3)
    assert made.number == 3
    with pytest.raises(UnknownAdapterError, match="everybody's list has no adapter 'cats'"):
        await registry.remove("cats", "")
    with pytest.raises(UnknownAdapterError, match="tenant 'acme' has no adapter 'dogs'"):
        await registry.remove("dogs", "acme")


async def test_a_pin_is_written_to_the_current_adapter_of_the_name(
    registry: AdapterRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is moved to another adapter between the lookup and the change."""
    await registry.register(record())
    execute, has_looked = CommandConnection.execute, asyncio.Event()

    async def meanwhile(self: CommandConnection, *args: Any, **how: bool) -> Any:
        reply = await execute(self, *args, **how)
        if args[0] == "HGET" and not has_looked.is_set():
            has_looked.set()
            await registry.register(record(digest="d"))
        return reply

    monkeypatch.setattr(CommandConnection, "execute", meanwhile)
    pinned = await registry.pin("cats", "", pinned=True)
    assert (pinned.digest, pinned.pinned) == ("d" * 64, True)
    assert await registry.find("cats", "t") == pinned
    assert not (await registry.pin("cats", "", pinned=False)).pinned
