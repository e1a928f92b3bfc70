"""Message Batches through the real `anthropic` package."""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic

from penstock.ops.local.server import LocalGateway
from penstock.producer import Client
from penstock.producer.batches import BatchStore, run_batch

from ...processes import DEADLINE_S

pytestmark = pytest.mark.xdist_group("deployment")

BATCHES = "/v1/messages/batches"


def request_of(custom_id: str, text: str = "count from four to nine:", **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    params = {"model": "demo", "max_tokens": 64, "temperature": 0, "messages": messages} | fields
    return {"custom_id": custom_id, "params": params}


async def results_of(claude: AsyncAnthropic, batch_id: str) -> dict[str, Any]:
    return {line.custom_id: line.result async for line in await claude.messages.batches.results(batch_id)}


async def test_a_batch_from_its_creation_to_its_deletion(
    claude: AsyncAnthropic, store: BatchStore, client: Client
) -> None:
    batches = claude.messages.batches
    batch = await batches.create(requests=[request_of("good"), request_of("ö", top_p=7.0)])
    assert (batch.type, batch.processing_status, batch.request_counts.processing) == ("message_batch", "in_progress", 2)
    assert (batch.ended_at, batch.results_url) == (None, None)
    assert (batch.expires_at - batch.created_at).total_seconds() == 24 * 3600
    for early in (batches.delete, batches.results):
        with pytest.raises((anthropic.ConflictError, anthropic.AnthropicError), match=r"not ended|results_url"):
            await early(batch.id)
    await run_batch(client, store, batch.id)
    ended = await batches.retrieve(batch.id)
    counts = ended.request_counts
    assert (ended.processing_status, counts.succeeded, counts.errored, counts.processing) == ("ended", 1, 1, 0)
    assert ended.ended_at is not None
    results = await results_of(claude, batch.id)
    assert (results["good"].type, results["ö"].type) == ("succeeded", "errored")
    message = results["good"].message
    assert (message.content[0].text, message.stop_reason) == (" four five six seven eight nine.", "end_turn")
    error = results["ö"].error.error
    assert (error.type, "top_p" in error.message) == ("invalid_request_error", True)
    with pytest.raises(anthropic.ConflictError, match="has ended"):
        await batches.cancel(batch.id)
    record = await store.own_record(batch.id)
    assert (await batches.delete(batch.id)).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        await batches.retrieve(batch.id)
    files = [file.id for file in (await store.files.list()).data]
    assert not {record.spec.input_file_id, record.batch.output_file_id, record.batch.error_file_id} & {*files}


async def test_a_cancelled_batch_and_the_list(claude: AsyncAnthropic, store: BatchStore, client: Client) -> None:
    batches = claude.messages.batches
    created = [await batches.create(requests=[request_of(f"{number}")]) for number in range(3)]
    assert (await batches.cancel(created[1].id)).processing_status == "canceling"
    await run_batch(client, store, created[1].id)
    counts = (await batches.retrieve(created[1].id)).request_counts
    assert (counts.canceled, counts.errored, counts.succeeded) == (1, 0, 0)
    assert [result.type for result in (await results_of(claude, created[1].id)).values()] == ["canceled"]
    newest_first = [batch.id for batch in created[::-1]]
    page = await batches.list(limit=2)
    assert ([batch.id for batch in page.data], page.has_more) == (newest_first[:2], True)
    assert [batch.id async for batch in page][:3] == newest_first
    newer = await batches.list(before_id=created[0].id, limit=1)
    assert [batch.id for batch in newer.data] == [created[1].id]
    for batch in (created[0], created[2]):
        await batches.cancel(batch.id)
        await run_batch(client, store, batch.id)


async def test_requests_that_a_batch_cannot_have(claude: AsyncAnthropic) -> None:
    for requests, message in (
        ([], "requests must hold at least one request"),
        ([request_of("a"), request_of("a")], r"requests\[1\].custom_id must be unique"),
        ([request_of("a"), request_of("b", model="other")], r"requests\[1\].params.model must be the same"),
        ([request_of("a", stream=True)], r"requests\[0\].params.stream must be left out"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=message):
            await claude.messages.batches.create(requests=requests)
    with pytest.raises(anthropic.NotFoundError, match="no worker has ever served model 'none'"):
        await claude.messages.batches.create(requests=[request_of("a", model="none")])


async def test_a_batch_is_created_once_per_key(gateway: LocalGateway, store: BatchStore, client: Client) -> None:
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    async with httpx.AsyncClient(base_url=gateway.root_url, timeout=DEADLINE_S) as http:
        body = {"requests": [request_of("a")]}
        replies = await asyncio.gather(*(http.post(BATCHES, json=body, headers=headers) for _ in range(3)))
        (batch,) = {json.dumps(reply.json()) for reply in replies}
        other = await http.post(BATCHES, json={"requests": [request_of("b")]}, headers=headers)
        assert (other.status_code, other.json()["type"]) == (409, "error")
        await http.post(f"{BATCHES}/{json.loads(batch)['id']}/cancel")
    await run_batch(client, store, json.loads(batch)["id"])
