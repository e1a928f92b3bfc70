"""What is published on a request's channel and is no record of it: anybody may, and the log has what counts."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import structlog

from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason

from ....processes import DEADLINE_S
from ..harness import claim_one, until_followed, write


@pytest.mark.parametrize(
    "junk",
    [
        pytest.param(b"\xc1", id="no msgpack"),
        pytest.param(b"", id="empty"),
        pytest.param(b"hello", id="text"),
        pytest.param(b"\x91" * 100_000, id="nested"),
        pytest.param(msgspec.msgpack.encode(Delta(text="zz")).replace(b"zz", b"\xff\xff"), id="no UTF-8"),
    ],
)
async def test_junk_on_a_channel_is_passed_over_and_logged_once(client, broker, commands, junk: bytes) -> None:
    handle = await client.submit("hi")
    claim = await claim_one(broker)
    whole = asyncio.ensure_future(handle.result())
    await until_followed(commands, broker, claim)
    channel = broker.keys.output(handle.request_id)
    with structlog.testing.capture_logs() as logged:
        await commands.execute("PUBLISH", channel, junk)
        await write(broker, claim, 0, 65)
        await commands.execute("PUBLISH", channel, junk)
        await commands.execute("PUBLISH", channel, junk)
        await write(broker, claim, 1, 66, end=FinishReason.STOP)
        async with asyncio.timeout(DEADLINE_S):
            assert (await whole).text == "AB"
    (line,) = [line for line in logged if line["event"] == "record_undecodable"]
    assert (line["log_level"], line["request_id"]) == ("warning", handle.request_id)
