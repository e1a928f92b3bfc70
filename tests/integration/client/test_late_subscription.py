"""A request may be at work, or over, before its client's subscription has begun."""

from __future__ import annotations

import asyncio

import pytest

from penstock.producer import Client, FinishReason
from penstock.shared.broker import Broker
from penstock.shared.connection import CommandConnection, Subscriber

from .harness import claim_one, until, write


@pytest.mark.parametrize("is_over", [True, False])
async def test_what_came_before_the_subscription_is_told(
    client: Client, broker: Broker, commands: CommandConnection, monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    may_subscribe = asyncio.Event()
    subscribe = Subscriber.subscribe

    async def subscribe_late(self, *args):
        await may_subscribe.wait()
        return await subscribe(self, *args)

    monkeypatch.setattr(Subscriber, "subscribe", subscribe_late)
    streaming = asyncio.ensure_future(client.generate("hi"))
    claim = await claim_one(broker)
    await write(broker, claim, 0, 65)
    if is_over:
        await write(broker, claim, 1, 66, end=FinishReason.STOP)
    may_subscribe.set()
    if not is_over:

        async def is_heard() -> bool:
            return (await commands.execute("PUBSUB", "NUMSUB", broker.keys.output(claim.request_id)))[1] == 1

        await until(is_heard)
        await write(broker, claim, 1, 66, end=FinishReason.STOP)
    async with asyncio.timeout(60):
        output = await streaming
    assert output.text == "AB"
    assert output.outputs[0].token_ids == [65, 66]
