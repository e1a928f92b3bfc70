"""Calls with an ``Idempotency-Key``, repeated at two gateways, one of which is killed with -9."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.ops.local.server import LocalGateway
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client

from ...gate import Gate
from ...processes import DEADLINE_S

pytestmark = pytest.mark.xdist_group("deployment")

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
COUNT, COUNTED = "count from four to nine:", " four five six seven eight nine."
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "demo", "messages": [{"role": "user", "content": COUNT}], "temperature": 1.5, "n": 2},
    COMPLETIONS: {"model": "demo", "prompt": [COUNT, "spell 7:"], "temperature": 1.5},
    RESPONSES: {"model": "demo", "input": COUNT, "temperature": 1.5},
    MESSAGES: {"model": "demo", "messages": [{"role": "user", "content": COUNT}], "temperature": 1.0, "max_tokens": 60},
}


@pytest.fixture
def key() -> dict[str, str]:
    return {"Idempotency-Key": uuid.uuid4().hex}


@pytest.fixture
async def here(gateway: LocalGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.root_url, timeout=DEADLINE_S) as http:
        yield http


@pytest.fixture
def other_gateway(deployment: LocalStack, tmp_path: Path, files_dir: Path) -> Iterator[LocalGateway]:
    options = ["--lease-ttl", "60", "--files-dir", str(files_dir), "--reasoning-parser", "qwen3"]
    gateway = LocalGateway(deployment.url, options, tmp_path / "other.log")
    with gateway:
        yield gateway


@pytest.fixture
async def there(other_gateway: LocalGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=other_gateway.root_url, timeout=DEADLINE_S) as http:
        yield http


async def answer_of(http: httpx.AsyncClient, path: str, key: dict[str, str], **fields: Any) -> Any:
    reply = await http.post(path, json=BODIES[path] | fields, headers=key)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def event_of(lines: AsyncIterator[str]) -> Any:
    """Return the data of the next event of a stream."""
    return json.loads((await anext(line async for line in lines if line.startswith("data: "))).removeprefix("data: "))


@pytest.mark.parametrize("path", BODIES)
async def test_one_generation_answers_calls_at_two_gateways(
    here: httpx.AsyncClient, there: httpx.AsyncClient, key: dict[str, str], path: str
) -> None:
    """Without seeds two generations would differ, and have other ids."""
    first, second = await asyncio.gather(answer_of(here, path, key), answer_of(there, path, key))
    later = await answer_of(there, path, key)
    assert first == second == later
    assert (await answer_of(here, path, {}))["id"] != first["id"]


@pytest.mark.parametrize("path", BODIES)
async def test_another_body_is_a_conflict(here: httpx.AsyncClient, key: dict[str, str], path: str) -> None:
    await answer_of(here, path, key)
    other_path = next(other for other in BODIES if other != path)
    for name, body in ((path, BODIES[path] | {"top_p": 0.5}), (other_path, BODIES[other_path])):
        reply = await here.post(name, json=body, headers=key)
        assert reply.status_code == 409
        assert "was used for another body" in reply.json()["error"]["message"]
    reply = await here.post(path, json=BODIES[path], headers={"Idempotency-Key": "with space"})
    assert reply.status_code == 400
    assert "visible ASCII" in reply.json()["error"]["message"]


async def begin_and_kill(
    gateway: LocalGateway, http: httpx.AsyncClient, path: str, body: dict[str, Any], key: dict[str, str]
) -> Any:
    """Begin a stream and kill its gateway; return the first event."""
    async with http.stream("POST", path, json=body | {"stream": True}, headers=key) as reply:
        first = await event_of(reply.aiter_lines())
        await asyncio.to_thread(gateway.kill)
    return first


async def test_a_stream_of_a_killed_gateway_is_joined_at_another(
    here: httpx.AsyncClient,
    other_gateway: LocalGateway,
    there: httpx.AsyncClient,
    key: dict[str, str],
    gate: Gate,
) -> None:
    gate.hold_at(3)
    body = BODIES[CHAT] | {"n": 1, "temperature": 0}
    begun = await begin_and_kill(other_gateway, there, CHAT, body, key)
    joining = asyncio.create_task(here.post(CHAT, json=body, headers=key))
    async with here.stream("POST", CHAT, json=body | {"stream": True}, headers=key) as reply:
        lines = reply.aiter_lines()
        first = await event_of(lines)
        gate.open()
        chunks = [first, *[json.loads(line[6:]) async for line in lines if line.startswith("data: {")]]
    assert {chunk["id"] for chunk in chunks} == {begun["id"]}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == COUNTED
    whole = (await joining).json()
    assert (whole["id"], whole["choices"][0]["message"]["content"]) == (begun["id"], COUNTED)


async def test_a_response_of_a_killed_gateway_is_joined_at_another(
    here: httpx.AsyncClient,
    other_gateway: LocalGateway,
    there: httpx.AsyncClient,
    key: dict[str, str],
    gate: Gate,
) -> None:
    gate.hold_at(3)
    body = BODIES[RESPONSES] | {"temperature": 0}
    begun = (await begin_and_kill(other_gateway, there, RESPONSES, body, key))["response"]
    joining = asyncio.create_task(here.post(RESPONSES, json=body, headers=key))
    gate.open()
    whole = (await joining).json()
    assert (whole["id"], whole["created_at"], whole["status"]) == (begun["id"], begun["created_at"], "completed")
    assert whole["output"][0]["content"][0]["text"] == COUNTED
    background = await here.post(RESPONSES, json=body | {"background": True}, headers=key)
    assert background.status_code == 409


async def test_a_background_response_is_created_once(here: httpx.AsyncClient, key: dict[str, str]) -> None:
    body = BODIES[RESPONSES] | {"background": True}
    first, second = [(await here.post(RESPONSES, json=body, headers=key)).json() for _ in range(2)]
    assert first["id"] == second["id"]
    assert (await here.get(f"{RESPONSES}/{first['id']}")).status_code == 200


async def test_a_cancelled_generation_is_started_again(
    here: httpx.AsyncClient, client: Client, key: dict[str, str], gate: Gate
) -> None:
    gate.hold_at(3)
    body = BODIES[CHAT] | {"n": 1, "temperature": 0}
    async with here.stream("POST", CHAT, json=body | {"stream": True}, headers=key) as reply:
        begun = await event_of(reply.aiter_lines())
        await client.cancel(begun["id"], model="demo")
        gate.open()
    again = await here.post(CHAT, json=body, headers=key)
    assert again.json()["choices"][0]["message"]["content"] == COUNTED
    assert again.json()["id"] != begun["id"]
    assert (await here.post(CHAT, json=body, headers=key)).json() == again.json()


async def test_a_file_is_uploaded_once(here: httpx.AsyncClient, there: httpx.AsyncClient, key: dict[str, str]) -> None:
    def upload(http: httpx.AsyncClient, text: bytes = b"{}", **fields: str) -> Any:
        return http.post("/v1/files", files={"file": ("a", text)}, data={"purpose": "batch"} | fields, headers=key)

    assert (await upload(here, purpose="assistants")).status_code == 400  # does not use up the key
    replies = await asyncio.gather(upload(here), upload(there))
    replies.append(await upload(there))
    first, *others = [reply.json() for reply in replies]
    assert others == [first] * 2
    assert (await here.get(f"/v1/files/{first['id']}/content")).content == b"{}"
    for other in (upload(here, b"[]"), upload(here, b"{}", **{"expires_after[seconds]": "3600"})):
        reply = await other
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "idempotency_key_reused")


async def test_a_batch_is_created_once(here: httpx.AsyncClient, there: httpx.AsyncClient, key: dict[str, str]) -> None:
    row = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": BODIES[COMPLETIONS]}
    upload = {"file": ("rows.jsonl", json.dumps(row).encode())}
    file = (await here.post("/v1/files", files=upload, data={"purpose": "batch"})).json()
    body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    replies = [await http.post("/v1/batches", json=body, headers=key) for http in (here, there)]
    assert len({reply.json()["id"] for reply in replies}) == 1
    assert (await here.post("/v1/batches", json=body | {"metadata": {"a": "b"}}, headers=key)).status_code == 409
