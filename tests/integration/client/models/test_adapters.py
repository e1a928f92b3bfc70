"""Adapters from a caller's side: names, whose they are, and what a request keeps of them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from penstock.producer import Client, EngineCallError, LoRARequest
from penstock.shared import errors
from penstock.shared.broker import Broker, Claim
from penstock.shared.connection import CommandConnection
from penstock.shared.control.calls import CallError
from penstock.shared.control.model import AddLora, LoraChanged, LoraList, PinLora, RemoveLora
from penstock.shared.deployment.audit import Audit
from penstock.shared.deployment.records import ModelCard
from penstock.shared.errors import AdapterFileError, UnknownAdapterError, UnsupportedAdapterError
from penstock.shared.keys import Keys
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.lora import adapter_digest

from ....adapter_folder import write_adapter
from ..harness import claim_one
from ..test_engine_control import PlayedEngine, play, two

__all__ = ["play", "two"]

Two = tuple[PlayedEngine, PlayedEngine]


async def digest_of(folder: str | Path) -> str:
    return await asyncio.to_thread(adapter_digest, folder)


def request_of(claim: Claim) -> EngineCoreRequest:
    return msgspec.msgpack.decode(claim.payload, type=EngineCoreRequest)


def adapter_of(claim: Claim) -> LoRARequest:
    adapter = request_of(claim).lora_request
    assert adapter is not None
    return adapter


@pytest.fixture
def cats(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "cats", base_model_name_or_path="base")


@pytest.fixture
def dogs(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "dogs", b"other weights")


def answers(engine: PlayedEngine) -> None:
    loaded: set[int] = set()

    def answer(command: Any) -> Any:
        call = command.call
        if isinstance(call, AddLora):
            is_new = call.lora_request.lora_int_id not in loaded
            loaded.add(call.lora_request.lora_int_id)
            return LoraChanged(is_new)
        if isinstance(call, RemoveLora):
            is_there = call.lora_id in loaded
            loaded.discard(call.lora_id)
            return LoraChanged(is_there)
        return LoraChanged(True) if isinstance(call, PinLora) else LoraList(sorted(loaded))

    engine.answer = answer


async def test_add_lora_registers_and_loads_at_all_engines(client: Client, two: Two, cats: Path) -> None:
    for engine in two:
        answers(engine)
    assert await client.add_lora(LoRARequest("cats", 3, str(cats))) == {"w-0": True, "w-1": True}
    assert await client.add_lora(LoRARequest("cats", 3, str(cats))) == {"w-0": False, "w-1": False}
    assert await client.add_lora("cats", engine_id="w-0") == {"w-0": False}
    (record,) = await client.adapters()
    assert (record.name, record.number, record.tenant, record.model) == ("cats", 3, "", "m")
    assert (record.digest, record.path) == (await digest_of(cats), str(cats))
    assert (record.rank, record.target_modules, record.base_model_name) == (8, ("q_proj", "v_proj"), "base")
    assert record.num_bytes == sum(path.stat().st_size for path in cats.iterdir())
    assert two[0].heard[0].call == AddLora(record.request())
    assert await client.list_loras() == {"w-0": {3}, "w-1": {3}}


async def test_a_pinned_adapter_is_loaded_and_recorded(client: Client, two: Two, cats: Path, dogs: Path) -> None:
    for engine in two:
        answers(engine)
    await client.register_lora("cats", cats)
    assert await client.pin_lora("cats") == {"w-0": True, "w-1": True}
    (record,) = await client.adapters()
    assert record.pinned
    assert [command.call for command in two[1].heard] == [AddLora(_unpinned(record).request()), PinLora(1)]
    assert await client.unpin_lora(1, engine_id="w-1") == {"w-1": True}
    assert two[1].heard[-1].call == PinLora(1, pinned=False)
    assert not (await client.adapters())[0].pinned
    with pytest.raises(UnknownAdapterError, match="everybody's list has no adapter 'dogs'"):
        await client.pin_lora("dogs")


async def test_a_pinned_name_stays_pinned_when_it_is_pointed_elsewhere(
    client: Client, two: Two, cats: Path, dogs: Path
) -> None:
    """Engines release the previous adapter unless another pinned name uses it."""
    for engine in two:
        answers(engine)
    await client.add_lora("pets", cats)
    await client.pin_lora("pets")
    for folder, calls in (
        (dogs, [PinLora(1, pinned=False), PinLora(2)]),
        (dogs, [PinLora(2)]),
        (cats, [PinLora(2, pinned=False), PinLora(1)]),
    ):
        two[0].heard.clear()
        await client.add_lora("pets", folder)
        (record,) = await client.adapters()
        assert record.pinned
        assert [command.call for command in two[0].heard] == [AddLora(_unpinned(record).request()), *calls]
    await client.register_lora("others", cats)
    await client.pin_lora("others")
    two[0].heard.clear()
    await client.add_lora("pets", dogs)
    assert [command.call for command in two[0].heard][1:] == [PinLora(2)], "the other name keeps it"


async def test_a_pinned_name_that_goes_takes_its_pin_along(client: Client, two: Two, cats: Path) -> None:
    for engine in two:
        answers(engine)
    for name in ("cats", "pets"):
        await client.add_lora(name, cats)
    await client.pin_lora("pets")
    assert await client.remove_lora("pets") == {}
    assert [engine.heard[-1].call for engine in two] == [PinLora(1, pinned=False)] * 2
    (record,) = await client.adapters()
    assert (record.name, record.pinned) == ("cats", False)


def _unpinned(record: Any) -> Any:
    return msgspec.structs.replace(record, pinned=False)


async def test_removing_by_number_or_name(client: Client, two: Two, cats: Path, dogs: Path) -> None:
    for engine in two:
        answers(engine)
    await client.add_lora("cats", cats)
    await client.register_lora("katzen", cats)
    await client.add_lora("dogs", dogs)
    assert await client.remove_lora("cats") == {}  # it has another name
    assert await client.remove_lora("katzen") == {"w-0": True, "w-1": True}
    assert await client.remove_lora(2) == {"w-0": True, "w-1": True}
    assert await client.adapters() == []
    assert await client.remove_lora(2) == {"w-0": False, "w-1": False}
    with pytest.raises(UnknownAdapterError):
        await client.remove_lora("cats")


async def test_a_name_registered_without_engines_is_valid_for_later_engines(
    client: Client, broker: Broker, cats: Path, play: Any
) -> None:
    assert await client.add_lora("cats", cats) == {}
    assert [record.name for record in await client.adapters("m")] == ["cats"]
    with pytest.raises(errors.EngineNotFoundError):
        await client.add_lora("cats", engine_id="gone")


async def test_adding_raises_the_reason_of_an_engine_that_cannot_load_the_adapter(
    client: Client, two: Two, cats: Path
) -> None:
    answers(two[0])
    two[1].answer = lambda command: CallError("adapter_file", "there is no folder here")
    with pytest.raises(EngineCallError, match="w-1: there is no folder here"):
        await client.add_lora("cats", cats)
    assert [record.name for record in await client.adapters()] == ["cats"]


async def test_a_name_keeps_its_adapter_if_no_engine_can_load_the_new_one(
    client: Client, two: Two, cats: Path, dogs: Path
) -> None:
    for engine in two:
        engine.answer = lambda command: CallError("adapter_file", "it is of another model")
    with pytest.raises(EngineCallError, match=r"w-0: it is of .*; no engine has loaded it, so lora_name 'pets' "):
        await client.add_lora("pets", cats)
    assert await client.adapters() == []
    former, _ = await client.register_lora("pets", cats)
    with pytest.raises(EngineCallError, match=f"points to adapter {former.digest[:12]} again"):
        await client.add_lora("pets", dogs)
    assert await client.adapters() == [former]
    # What somebody else has pointed elsewhere meanwhile is theirs.
    record, before = await client.register_lora("pets", dogs)
    (theirs, _) = await client.register_lora("pets", cats)
    with pytest.raises(EngineCallError) as caught:
        await client.load_registered(record, before)
    assert "no engine has loaded it" not in str(caught.value)
    assert await client.adapters() == [theirs]


async def test_a_request_keeps_the_adapter_its_name_had_when_enqueued(
    client: Client, broker: Broker, cats: Path, dogs: Path
) -> None:
    await client.add_lora("pets", cats)
    await client.submit("hi", lora_request="pets", request_id="first")
    record, former = await client.register_lora("pets", dogs)
    assert former is not None
    assert former.digest == await digest_of(cats)
    await client.submit("hi", lora_request="pets", request_id="second")
    first, second = adapter_of(await claim_one(broker)), adapter_of(await claim_one(broker))
    assert (first.digest, first.lora_path) == (await digest_of(cats), str(cats))
    assert second == record.request()
    assert second.lora_int_id == 2


@pytest.mark.parametrize("model", ["pets", None])
async def test_the_name_of_an_adapter_is_the_name_of_a_model(
    redis_url: str, namespace: str, client: Client, broker: Broker, cats: Path, model: str | None
) -> None:
    await client.add_lora("pets", cats)
    async with Client.connect(redis_url, namespace=namespace, model=None if model else "pets") as other:
        handle = await other.submit("hi", model=model)
        claim = await claim_one(broker)
        assert (request_of(claim).model, adapter_of(claim).lora_name) == ("m", "pets")
        assert handle.model == "m"
        await other.cancel(handle.request_id, model=model)
        with pytest.raises(errors.ValidationError, match="lora_request must be left out because model "):
            await other.submit("hi", model=model, lora_request="pets")


async def test_streamed_input_and_pooled_prompts_carry_it(
    client: Client, commands: CommandConnection, namespace: str, broker: Broker, cats: Path
) -> None:
    card = ModelCard(model="m", max_model_len=100, registered_at=1.0, supported_tasks=("generate", "embed"))
    await commands.execute("HSET", Keys(namespace).models(), "m", msgspec.json.encode(card))
    await client.models()
    await client.add_lora("pets", cats)
    async with client.converse(model="pets") as conversation:
        await conversation.send("hi")
        assert adapter_of(await claim_one(broker)).digest == await digest_of(cats)
    handles = await client.submit_many(["a", "b"], lora_request="pets")
    assert [adapter_of(await claim_one(broker)).lora_name for _ in handles] == ["pets", "pets"]


async def test_an_adapter_of_a_tenant_is_private(client: Client, broker: Broker, cats: Path, dogs: Path) -> None:
    await client.register_lora("pets", cats)
    await client.register_lora("pets", dogs, tenant="acme")
    await client.register_lora("secret", dogs, tenant="acme")
    for tenant, digest in (("acme", await digest_of(dogs)), ("other", await digest_of(cats))):
        await client.submit("hi", model="pets", tenant=tenant)
        assert adapter_of(await claim_one(broker)).digest == digest
    with pytest.raises(UnknownAdapterError, match="model 'm' has no adapter 'secret' for tenant 'other'"):
        await client.submit("hi", lora_request="secret", tenant="other")
    with pytest.raises(errors.UnknownModelError, match="no worker has ever served model 'secret'"):
        await client.submit("hi", model="secret", tenant="other")


async def test_wrong_adapters_are_refused_before_enqueueing(
    client: Client, commands: CommandConnection, namespace: str, broker: Broker, cats: Path, tmp_path: Path
) -> None:
    await commands.execute("HSET", Keys(namespace).models(), "n", msgspec.json.encode(ModelCard(model="n")))
    await client.register_lora("pets", cats, model="m")
    dora = await asyncio.to_thread(write_adapter, tmp_path / "dora", use_dora=True)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (
            client.submit("hi", model="m", lora_request=cast(Any, 3)),
            errors.ValidationError,
            "must be a LoRARequest or a name",
        ),
        (client.submit("hi", model="m", lora_request="no"), UnknownAdapterError, "has no adapter 'no'"),
        (client.submit("hi", model="n", lora_request="pets"), errors.ValidationError, "of model 'm', not of 'n'"),
        (client.register_lora("n", cats, model="m"), errors.ValidationError, "'n' is the name of a model"),
        (client.register_lora("pets", cats, model="n"), errors.ValidationError, "is that of an adapter of model 'm'"),
        (client.register_lora("a{b", cats, model="m"), errors.ValidationError, "lora_name must hold no braces"),
        (client.register_lora("a", tmp_path, model="m"), AdapterFileError, "adapter_config.json cannot be read"),
        (client.register_lora("a", tmp_path / "no", model="m"), AdapterFileError, "there is no folder"),
        (client.register_lora("a", dora, model="m"), UnsupportedAdapterError, "DoRA is not computed"),
        (client.register_lora("a", model="m"), errors.ValidationError, "lora_path must be a string that is not empty"),
        (
            client.submit("hi", model="m", lora_request=LoRARequest("a", 1, str(tmp_path / "no"))),
            AdapterFileError,
            "lora_path: there is no folder .*; or register the adapter by penstock lora add",
        ),
    ]
    for call, kind, message in wrong:
        with pytest.raises(kind, match=message):
            await call
    assert await broker.count_waiting() == 0
    assert len(await client.adapters()) == 1


async def test_a_folder_that_is_not_registered_is_taken_by_its_content(
    client: Client, broker: Broker, tmp_path: Path
) -> None:
    folder = await asyncio.to_thread(write_adapter, tmp_path / "own")
    before = await digest_of(folder)
    await client.submit("hi", lora_request=LoRARequest("own", 7, str(folder)))
    assert adapter_of(await claim_one(broker)) == LoRARequest("own", 7, str(folder), digest=before)
    await asyncio.to_thread(write_adapter, folder, b"grown, so that it is another")
    await client.submit("hi", lora_request=LoRARequest("own", 7, str(folder)))
    after = await digest_of(folder)
    assert adapter_of(await claim_one(broker)).digest == after != before


async def test_a_copy_is_stored_under_its_digest_completely_or_not_at_all(
    client: Client, cats: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared" / "adapters"
    for name in ("a", "b"):
        record, _ = await client.register_lora(name, cats, copy_to=shared)
        assert record.path == str(shared / record.digest)
        assert await digest_of(record.path) == record.digest == await digest_of(cats)
    assert os.listdir(shared) == [record.digest]
    weights = shared / record.digest / "adapter_model.safetensors"
    await asyncio.to_thread(weights.write_bytes, b"damaged")
    with pytest.raises(AdapterFileError, match="does not have the contents of its name"):
        await client.register_lora("c", cats, copy_to=shared)
    with pytest.raises(errors.ConfigurationError, match=r"the folder .* for adapters cannot be used"):
        await client.register_lora("c", cats, copy_to=cats / "adapter_config.json")


async def test_changes_are_in_the_audit(
    client: Client, commands: CommandConnection, namespace: str, broker: Broker, cats: Path
) -> None:
    await client.register_lora("pets", cats, tenant="acme")
    await client.pin_lora("pets", tenant="acme")
    await client.remove_lora("pets", tenant="acme")
    entries = await Audit(commands, Keys(namespace)).read()
    assert [(entry.action, entry.target, entry.result) for entry in reversed(entries)] == [
        ("adapter.add", "pets", "ok"),
        ("adapter.pin", "pets", "ok"),
        ("adapter.remove", "pets", "ok"),
    ]
