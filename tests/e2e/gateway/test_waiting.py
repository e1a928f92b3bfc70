"""Streams that are accepted while their requests wait, through the `openai` and `anthropic` packages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from penstock.ops.local.server import LocalGateway
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, SamplingParams

from ...processes import DEADLINE_S

pytestmark = pytest.mark.xdist_group("deployment")

COUNT = "count from four to nine:"
COUNTED = " four five six seven eight nine."
MESSAGES: Any = [{"role": "user", "content": COUNT}]
POSITION = "x-penstock-queue-position"


@pytest.fixture
def accepting(deployment: LocalStack, tmp_path: Path) -> Iterator[LocalGateway]:
    """A gateway that accepts a stream after 8 s, and then sends comments all the time."""
    options = ["--status-wait", "8", "--keep-alive", "0.05"]
    with LocalGateway(deployment.url, options, tmp_path / "gateway.log") as gateway:
        yield gateway


async def test_comments_on_the_queue_disturb_no_client(accepting: LocalGateway, client: Client) -> None:
    await client.pause_generation()
    try:
        before = await client.submit(COUNT, SamplingParams(max_tokens=2))
        async with (
            AsyncOpenAI(base_url=accepting.base_url, api_key="any", max_retries=0, timeout=DEADLINE_S) as openai,
            AsyncAnthropic(base_url=accepting.root_url, api_key="any", max_retries=0, timeout=DEADLINE_S) as claude,
        ):
            chat, completion, response, message = await asyncio.gather(
                openai.chat.completions.create(model="demo", messages=MESSAGES, temperature=0, stream=True),
                openai.completions.create(model="demo", prompt=COUNT, temperature=0, max_tokens=64, stream=True),
                openai.responses.create(model="demo", input=COUNT, temperature=0, stream=True),
                claude.messages.create(
                    model="demo", max_tokens=64, messages=MESSAGES, stream=True, extra_body={"temperature": 0}
                ),
            )
            positions = [int(stream.response.headers[POSITION]) for stream in (chat, completion, response, message)]
            assert sorted(positions) == [1, 2, 3, 4]
            await client.resume_generation()
            chat_text = [chunk.choices[0].delta.content or "" async for chunk in chat]
            completion_text = [chunk.choices[0].text async for chunk in completion]
            response_text = [event.delta async for event in response if event.type == "response.output_text.delta"]
            message_text = [
                event.delta.text
                async for event in message
                if event.type == "content_block_delta" and event.delta.type == "text_delta"
            ]
        for text in (chat_text, completion_text, response_text, message_text):
            assert "".join(text) == COUNTED
        await before.result()
    finally:
        await client.resume_generation()
