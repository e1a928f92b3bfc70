"""Bytes of images lie beside the requests that need them, once, and for no longer."""

from __future__ import annotations

import pytest

from penstock.shared.broker import Broker, DeadLetter
from penstock.shared.broker.admission import Entry, enqueue_args
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import DamagedRecordError
from penstock.shared.params.images import ImageInput

from .conftest import CAUSE, TTL_MS, assert_nothing_is_left, enqueue, final, take

ONE, OTHER = ImageInput.from_bytes(b"one"), ImageInput.from_bytes(b"other")


async def kept(commands: CommandConnection, broker: Broker) -> set[bytes]:
    """The bytes that are there."""
    found = set()
    for image in (ONE, OTHER):
        data = await commands.execute("GET", broker.keys.image(image.digest))
        found |= {data} - {None}
    return found


def test_bytes_travel_once_in_a_call() -> None:
    entries = [Entry(request_id=name, payload=b"p", result_ttl_ms=1, images=(ONE, OTHER)) for name in "ab"]
    assert enqueue_args(entries)[1:] == [b"p", b"p", b"one", b"other"]


async def test_they_stay_until_the_last_request_has_ended(broker: Broker, commands: CommandConnection) -> None:
    await enqueue(broker, "a", "b", images=(ONE, OTHER, ONE))
    await enqueue(broker, "c", images=(OTHER,))
    claims = await take(broker, "e0", 3)
    assert await broker.images([ONE.digest, OTHER.digest, ONE.digest]) == [b"one", b"other", b"one"]
    assert await broker.finish([final("a", 1, 0, 7)]) == []
    assert await kept(commands, broker) == {b"one", b"other"}
    await broker.release([(claim.request_id, claim.epoch) for claim in claims if claim.request_id == "b"])
    assert await broker.cancel("b")
    assert await kept(commands, broker) == {b"other"}
    with pytest.raises(DamagedRecordError, match="are no longer in Redis"):
        await broker.images([OTHER.digest, ONE.digest])
    assert await broker.finish([final("c", 1, 0, 7)]) == []
    await broker.withdraw("e0")
    await assert_nothing_is_left(commands, broker)


async def test_a_request_that_is_known_already_brings_none(broker: Broker, commands: CommandConnection) -> None:
    await enqueue(broker, "a", call="1")
    await broker.enqueue("a", b"payload", result_ttl_ms=TTL_MS, images=(ONE,), call="2")
    assert await kept(commands, broker) == set()


async def test_a_parked_request_keeps_them_for_its_replay(broker: Broker, commands: CommandConnection) -> None:
    letter = DeadLetter(commands, broker.keys)
    await enqueue(broker, "a", "b", images=(ONE,))
    for claim in await take(broker, "e0", 2):
        assert await broker.park(claim, CAUSE, "poison_request", "it kills engines")
    assert await kept(commands, broker) == {b"one"}
    assert await letter.replay("a")
    assert await letter.purge("b")
    assert not await letter.purge("b")
    (claim,) = await take(broker, "e0", 1)
    assert await broker.images([ONE.digest]) == [b"one"]
    assert await broker.finish([final(claim.request_id, claim.epoch, 0, 7)]) == []
    await broker.withdraw("e0")
    await assert_nothing_is_left(commands, broker)
