"""Devices that may wake a model with several partitions."""

from __future__ import annotations

import pytest

from penstock.shared.broker import NEW, GrantReply
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys
from penstock.shared.partitions import open_homes
from penstock.shared.queue.lifecycle import RequestState
from penstock.shared.swap.views import SleepLevel

from ..conftest import LONG_MS
from .conftest import MODEL, Parts


@pytest.mark.parametrize("place", ["one"], indirect=True)
async def test_a_device_serves_all_partitions(commands: CommandConnection, namespace: str, parts: Parts) -> None:
    await parts.grow(2)
    brokers = [parts[number] for number in range(2)]
    layout = parts.layout.version
    homes = await open_homes(commands, Keys(namespace), MODEL)
    for device, wake_s in (("near", 1.0), ("far", 5.0)):
        await homes.renew(device, SleepLevel.DISK, wake_s, lease_ttl_ms=LONG_MS)
    for number, broker in enumerate(brokers):
        options = {"fail_fast": True, "band": "batch", "layout": layout}
        assert await broker.enqueue(f"r{number}", b"p", result_ttl_ms=60_000, **options) == NEW
    demand = await homes.demand()
    assert demand.num_waiting == {"batch": 2}
    assert {home.device for home in demand.homes} == {"far", "near"}
    grant = await homes.request_grant("far", 5.0, waited_s=demand.oldest_age_s["batch"], patience_s=1000.0)
    assert grant.reply is GrantReply.LATER
    assert (await homes.request_grant("near", 1.0)).is_granted
    assert (await homes.demand()).grants == ("near",)
    for device in ("near", "far"):
        await homes.leave(device)
    assert [await broker.state(f"r{number}") for number, broker in enumerate(brokers)] == [RequestState.FAILED] * 2
