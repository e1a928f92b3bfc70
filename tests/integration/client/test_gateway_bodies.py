"""Bodies of all endpoints with a body: fields without effect are named and counted, or refused; repeated ones."""

from __future__ import annotations

import asyncio
import re
import struct
from typing import Any

import httpx
import msgspec
import pytest

from penstock.producer.gateway.app import OPERATIONS
from penstock.producer.gateway.operations import build_openapi
from penstock.shared.broker import Broker, FinalRecord
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import ModelCard, PoolingSetup
from penstock.shared.keys import Keys
from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.params.pooling import Pooled

from .harness import claim_one, serve_gateway

MESSAGES = [{"role": "user", "content": "hi"}]
# By the name of the body's schema: its required fields. No worker serves the model.
BODIES: dict[str, dict[str, Any]] = {
    "ChatCompletionBody": {"messages": MESSAGES},
    "CompletionBody": {"prompt": "hi"},
    "ResponseBody": {"input": "hi"},
    "MessagesBody": {"messages": MESSAGES, "max_tokens": 5},
    "EmbeddingsBody": {"input": "hi"},
    "ClassifyBody": {"input": "hi"},
    "PoolBody": {"input": "hi"},
    "ScoreBody": {"text_1": "hi", "text_2": "ho"},
    "RerankBody": {"query": "hi", "documents": ["ho"]},
    "TokenizeBody": {"prompt": "hi"},
    "DetokenizeBody": {"tokens": [1]},
    "BatchBody": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
    "MessageBatchBody": {
        "requests": [{"custom_id": "a", "params": {"model": "none", "messages": MESSAGES, "max_tokens": 5}}]
    },
    "LoadBody": {"lora_name": "pets", "lora_path": "/nowhere"},
    "UnloadBody": {"lora_name": "pets"},
}
WITHOUT_MODEL = {"BatchBody", "MessageBatchBody", "LoadBody", "UnloadBody"}


def bodies() -> list[tuple[str, str]]:
    """Return path and schema of each operation with a JSON body."""
    references = []
    for path, methods in build_openapi(OPERATIONS, "1")["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            if "application/json" in content:
                assert method == "post"
                references.append((path, content["application/json"]["schema"]["$ref"].rpartition("/")[2]))
    return references


def body_of(schema: str) -> dict[str, Any]:
    return BODIES[schema] | ({} if schema in WITHOUT_MODEL else {"model": "none"})


async def counted(http: httpx.AsyncClient) -> float:
    text = (await http.get("/metrics")).text
    match = re.search(r'penstock_http_fields_ignored_total\{field="other"\} (\S+)', text)
    return float(match[1]) if match else 0.0


async def test_fields_without_effect_are_named_and_counted(deployment: dict[str, str]) -> None:
    async with serve_gateway(**deployment, lora_updating=True) as http:
        for number, (path, schema) in enumerate(bodies(), start=1):
            reply = await http.post(path, json=body_of(schema) | {"made_up": 1})
            assert reply.headers["x-penstock-ignored"] == "made_up", (path, reply.text)
            assert "made_up" not in reply.text
            assert await counted(http) == number
            plain = await http.post(path, json=body_of(schema))
            assert (plain.status_code, "x-penstock-ignored" in plain.headers) == (reply.status_code, False)
    assert len(bodies()) > 15


async def test_strict_fields_refuse_them(deployment: dict[str, str]) -> None:
    async with serve_gateway(**deployment, lora_updating=True, strict_fields=True) as http:
        for path, schema in bodies():
            reply = await http.post(path, json=body_of(schema) | {"made_up": 1})
            assert reply.status_code == 400, path
            assert "made_up is not supported; leave it out" in reply.text


@pytest.mark.parametrize("strict", [False, True])
async def test_fields_of_a_form(deployment: dict[str, str], strict: bool) -> None:
    async with serve_gateway(**deployment, strict_fields=strict) as http:
        form = {"purpose": "batch", "made_up": "1"}
        reply = await http.post("/v1/files", files={"file": ("rows.jsonl", b"{}")}, data=form)
        if strict:
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "made_up")
        else:
            assert (reply.status_code, reply.headers["x-penstock-ignored"]) == (200, "made_up")


def test_every_body_is_tried() -> None:
    bodies_of_operations = {operation.body for operation in OPERATIONS if operation.body_media_type.endswith("json")}
    assert {body.__name__ for body in bodies_of_operations if body is not None} == BODIES.keys()
    assert all(issubclass(body, msgspec.Struct) for body in bodies_of_operations if body is not None)


async def test_classes_are_computed_once_per_key(
    commands: CommandConnection, namespace: str, broker: Broker, deployment: dict[str, str]
) -> None:
    pooling = PoolingSetup(labels=("no", "yes"))
    card = ModelCard(model="m", max_model_len=100, registered_at=2.0, supported_tasks=("classify",), pooling=pooling)
    await commands.execute("HSET", Keys(namespace).models(), "m", msgspec.json.encode(card))
    body, headers = {"model": "m", "input": ["a", "b"]}, {"Idempotency-Key": "one"}
    async with serve_gateway(**deployment) as here, serve_gateway(**deployment) as there:
        calls = [asyncio.ensure_future(http.post("/classify", json=body, headers=headers)) for http in (here, there)]
        for number in range(2):
            claim = await claim_one(broker)
            pooled = Pooled(data=struct.pack("<2f", number, 1 - number), shape=(2,))
            delta = Delta(pooled=pooled, finish_reason=FinishReason.STOP)
            assert await broker.finish([FinalRecord(claim.request_id, claim.epoch, delta)]) == []
        calls.append(asyncio.ensure_future(there.post("/classify", json=body, headers=headers)))
        first, *others = [(await call).json() for call in calls]
        other = await here.post("/classify", json=body | {"input": "a"}, headers=headers)
    assert others == [first] * 2
    assert {row["label"] for row in first["data"]} == {"no", "yes"}
    assert (other.status_code, await broker.count_waiting()) == (409, 0)
