"""The gateway and adapters, with engines that the test plays: names as models, tenants, changes over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.producer import Client
from penstock.producer.gateway.auth import ApiKeys
from penstock.shared.broker import Broker, EngineCapacity
from penstock.shared.connection import CommandConnection
from penstock.shared.control.calls import CallError
from penstock.shared.keys import Keys
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.params.lora import adapter_digest

from ....adapter_folder import write_adapter
from ...conftest import LONG_MS
from ..harness import claim_one, serve_gateway, write
from ..test_engine_control import PlayedEngine, play, two
from .test_adapters import adapter_of, answers, request_of

__all__ = ["play", "two"]

CHAT = "/v1/chat/completions"
Two = tuple[PlayedEngine, PlayedEngine]
Open = Callable[..., Any]


@pytest.fixture
def cats(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "cats")


@pytest.fixture
def dogs(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "dogs", b"other weights")


@pytest.fixture
def open_gateway(deployment: dict[str, str]) -> Open:
    return partial(serve_gateway, **deployment)


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


async def answered(broker: Broker, asking: Awaitable[httpx.Response]) -> tuple[Any, httpx.Response]:
    """Play the engine for one request; returns what it was given, and what its caller got."""
    task = asyncio.ensure_future(asking)
    claim = await claim_one(broker)
    await write(broker, claim, 0, 104, 105, end=FinishReason.STOP)
    return claim, await task


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(model="pets")),
        ("/v1/completions", {"model": "pets", "prompt": "hi"}),
        ("/v1/responses", {"model": "pets", "input": "hi"}),
    ],
)
async def test_the_name_of_an_adapter_is_a_model_to_callers(
    client: Client, broker: Broker, open_gateway: Open, cats: Path, path: str, body: dict[str, Any]
) -> None:
    record, _ = await client.register_lora("pets", cats)
    async with open_gateway() as http:
        claim, answer = await answered(broker, http.post(path, json=body))
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "pets"
        assert (request_of(claim).model, adapter_of(claim)) == ("m", record.request())
        plain, answer = await answered(broker, http.post(path, json=body | {"model": "m"}))
        assert answer.json()["model"] == "m"
        assert request_of(plain).lora_request is None


async def test_a_stream_is_called_by_the_adapters_name(
    client: Client, broker: Broker, open_gateway: Open, cats: Path
) -> None:
    await client.register_lora("pets", cats)
    async with open_gateway() as http:
        _, answer = await answered(broker, http.post(CHAT, json=chat(model="pets", stream=True)))
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        assert {json.loads(line)["model"] for line in lines} == {"pets"}


async def test_models_are_listed_with_the_adapters_that_a_tenant_may_name(
    client: Client, commands: CommandConnection, namespace: str, broker: Broker, open_gateway: Open, cats: Path
) -> None:
    await client.register_lora("common", cats)
    await client.register_lora("secret", cats, tenant="acme")
    # Only models that somebody serves are listed.
    await broker.claim("e0", EngineCapacity(max_num_seqs=4, num_seqs=0), lease_ttl_ms=LONG_MS)
    keys = ApiKeys(commands, Keys(namespace))
    (acme, _), (other, _) = await keys.create("acme"), await keys.create("other")
    async with open_gateway(api_keys=True) as http:

        async def names(key: str) -> dict[str, Any]:
            answer = await http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            return {model["id"]: (model["root"], model["parent"]) for model in answer.json()["data"]}

        assert await names(other) == {"m": ("m", None), "common": (str(cats), "m")}
        assert list(await names(acme)) == ["m", "common", "secret"]
        for key, status in ((acme, 200), (other, 404)):
            headers = {"authorization": f"Bearer {key}"}
            assert (await http.get("/v1/models/secret", headers=headers)).status_code == status
        refused = await http.post(CHAT, json=chat(model="secret"), headers={"authorization": f"Bearer {other}"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert await broker.count_waiting() == 0


async def test_adapters_are_changed_over_http_only_where_that_is_allowed(
    client: Client, broker: Broker, open_gateway: Open, two: Two, cats: Path, dogs: Path
) -> None:
    for engine in two:
        answers(engine)
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    body = {"lora_name": "pets", "lora_path": str(cats)}
    async with open_gateway() as http:
        for path in (load, unload):
            refused = await http.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "lora_updating_off")
    async with open_gateway(lora_updating=True) as http:
        loaded = await http.post(load, json=body)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'pets' added successfully.")
        assert await client.list_loras() == {"w-0": {1}, "w-1": {1}}
        again = await http.post(load, json=body)
        assert (again.status_code, again.json()["error"]["code"]) == (400, "adapter_exists")
        inplace = await http.post(load, json=body | {"lora_path": str(dogs), "load_inplace": True})
        assert inplace.status_code == 200
        (record,) = await client.adapters()
        assert (record.tenant, record.digest) == ("", await asyncio.to_thread(adapter_digest, dogs))
        assert (await http.post(unload, json={"lora_name": "pets"})).status_code == 200
        assert await client.adapters() == []
        unknown = await http.post(unload, json={"lora_name": "pets"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "adapter_not_found")
        assert unknown.json()["error"]["param"] == "lora_name"
        elsewhere = await http.post(load, json=body | {"base_model_name": "nope"})
        assert (elsewhere.status_code, elsewhere.json()["error"]["param"]) == (404, "base_model_name")
        wrong = await http.post(load, json=body | {"base_model_name": "no\nname"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "base_model_name")
        missing = await http.post(load, json={"lora_name": "pets", "lora_path": "/nowhere"})
        assert (missing.status_code, missing.json()["error"]["param"]) == (400, "lora_path")
        two[1].answer = lambda command: CallError("adapter_file", "it does not fit")
        failed = await http.post(load, json=body)
        assert (failed.status_code, failed.json()["error"]["code"]) == (400, "adapter_not_loaded")
        assert "it does not fit" in failed.json()["error"]["message"]
        assert await client.adapters() == []
        two[0].answer = two[1].answer
        assert (await http.post(load, json=body)).json()["error"]["code"] == "adapter_not_loaded"
        assert await client.adapters() == []


async def test_over_http_a_tenant_changes_its_own_names(
    client: Client,
    commands: CommandConnection,
    namespace: str,
    broker: Broker,
    open_gateway: Open,
    cats: Path,
    dogs: Path,
) -> None:
    await client.register_lora("pets", cats)
    acme, _ = await ApiKeys(commands, Keys(namespace)).create("acme")
    headers = {"authorization": f"Bearer {acme}"}
    async with open_gateway(api_keys=True, lora_updating=True) as http:
        body = {"lora_name": "pets", "lora_path": str(dogs), "base_model_name": "m"}
        assert (await http.post("/v1/load_lora_adapter", json=body, headers=headers)).status_code == 200
        assert [record.tenant for record in await client.adapters()] == ["", "acme"]
        claim, _ = await answered(broker, http.post(CHAT, json=chat(model="pets"), headers=headers))
        assert adapter_of(claim).lora_path == str(dogs)
        body = {"lora_name": "pets"}
        assert (await http.post("/v1/unload_lora_adapter", json=body, headers=headers)).status_code == 200
        assert [record.tenant for record in await client.adapters()] == [""]
        assert (await http.post("/v1/unload_lora_adapter", json=body, headers=headers)).status_code == 404


async def test_repeated_changes_of_adapters_succeed(open_gateway: Open, two: Two, cats: Path, dogs: Path) -> None:
    for engine in two:
        answers(engine)
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    body, name = {"lora_name": "pets", "lora_path": str(cats)}, {"lora_name": "pets"}
    async with open_gateway(lora_updating=True) as http:

        async def statuses(path: str, key: str, fields: dict[str, str]) -> list[int]:
            return [(await http.post(path, json=fields, headers={"Idempotency-Key": key})).status_code for _ in "ab"]

        assert await statuses(load, "one", body) == [200, 200]
        assert await statuses(load, "one", body | {"lora_path": str(dogs)}) == [409, 409]
        assert await statuses(load, "two", body | {"lora_path": str(dogs)}) == [400, 400]
        assert await statuses(unload, "three", name) == [200, 200]
        assert await statuses(unload, "one", name) == [409, 409]
        assert (await http.post(unload, json=name)).status_code == 404


@pytest.mark.parametrize("path", ["\0", "a\0b", "~nosuchuser/cats", "x" * 5000, "/" + "y/" * 3000, "\n", "/dev/null"])
async def test_a_path_that_is_no_folder_is_refused_by_name(open_gateway: Open, path: str) -> None:
    async with open_gateway(lora_updating=True) as http:
        told = await http.post("/v1/load_lora_adapter", json={"lora_name": "cats", "lora_path": path})
    assert (told.status_code, told.json()["error"]["param"]) == (400, "lora_path"), told.text
