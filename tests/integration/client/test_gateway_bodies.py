"""Bodies of all endpoints with a body: fields without effect are named and counted, or refused."""

from __future__ import annotations

import re
from typing import Any

import httpx
import msgspec
import pytest

from penstock.producer.gateway.app import OPERATIONS
from penstock.producer.gateway.operations import build_openapi

from .harness import serve_gateway

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
