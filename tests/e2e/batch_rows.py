"""Rows of the Batch API through a deployment, from lines to their callers' results."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from penstock.producer import Client
from penstock.producer.batches import BatchStatus, BatchStore, run_batch

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def answers_of_batch(
    client: Client, url: str, folder: Path, endpoint: str, bodies: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Run a batch to its end; the response of each row by its ``custom_id``, of those that failed as well."""
    async with BatchStore(url, folder) as store:
        file = await store.files.create(_lines(endpoint, bodies), filename="in.jsonl")
        batch = await store.create(input_file_id=file.id, endpoint=endpoint)
        ended = await run_batch(client, store, batch.id)
        assert ended.status is BatchStatus.COMPLETED
        responses: dict[str, Any] = {}
        for file_id in (ended.output_file_id, ended.error_file_id):
            if file_id is not None:
                content = b"".join([chunk async for chunk in store.files.content(file_id)])
                rows = [msgspec.json.decode(line) for line in content.splitlines()]
                responses |= {row["custom_id"]: row["response"] for row in rows}
        return responses


async def _lines(endpoint: str, bodies: dict[str, dict[str, Any]]) -> AsyncIterator[bytes]:
    for custom_id, body in bodies.items():
        row = {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body}
        yield msgspec.json.encode(row) + b"\n"
