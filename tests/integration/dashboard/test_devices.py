"""Devices that several models share, on their page and on that of engines."""

from __future__ import annotations

import time

import msgspec
import pytest

from penstock.shared.broker import EngineCapacity, Homes
from penstock.shared.messages.devices import DeviceModel, DeviceRecord, ModelPhase, SwapRecord
from penstock.shared.swap.rule import Reason
from penstock.shared.swap.views import SleepLevel

from ..conftest import LONG_MS
from .conftest import Site

GIB = 1 << 30
EVIL = "<b>x</b>"


async def write_device(site: Site, *models: DeviceModel, **changes: object) -> None:
    """Write the record of a device, as its keeper does."""
    device = DeviceRecord(
        device_id="host-1/cuda:0",
        worker_id="host-1",
        host="host",
        device="cuda:0",
        budget_bytes=8 * GIB,
        models=[*models],
        swap_share=0.125,
        debt_s=2.5,
    )
    device = msgspec.structs.replace(device, **changes)
    await site.connection.execute("SADD", site.keys.devices(), device.device_id)
    await site.connection.execute("SET", site.keys.device(device.device_id), msgspec.json.encode(device))


AWAKE = DeviceModel(name="chat", phase=ModelPhase.AWAKE, level=0, awake_bytes=4 * GIB, asleep_bytes=GIB, is_pinned=True)
ASLEEP = DeviceModel(
    name="coder",
    phase=ModelPhase.ASLEEP,
    level=1,
    awake_bytes=6 * GIB,
    asleep_bytes=GIB,
    weight_bytes=3 * GIB,
    lateness=1.25,
    standing_s=6.0,
    wake_s=1.5,
)
BROKEN = DeviceModel(name=EVIL, phase=ModelPhase.BROKEN, error="the file is cut off")


@pytest.mark.parametrize("path", ["/devices", "/engines"])
async def test_a_device_is_a_bar_with_the_state_of_its_models(site: Site, path: str) -> None:
    swap = SwapRecord(
        at=time.time() - 60, left=["coder"], entered="chat", reason=Reason.LATE, took_s=1.5, num_handed_back=2
    )
    await write_device(site, AWAKE, ASLEEP, BROKEN, last_swap=swap)
    text = (await (await site.visitor()).get(path)).text
    assert "Device cuda:0 of host" in text
    assert 'aria-label="5.0 GiB of 8.0 GiB in use: chat 50%, coder 12%"' in text
    assert '<rect class="good" x="0.0" y="0" width="50.0"' in text
    assert '<rect class="warn" x="50.0" y="0" width="12.5"' in text
    assert "Swaps took <b>12%</b> of the last 10 minutes; debt 2.5 s." in text
    assert "coder left, chat woke, in 1.5 s, 60 s ago; 2 requests returned to the queue; requests of the next" in text
    for words in ("awake, pinned", "asleep 1", "broken", "the file is cut off"):
        assert words in text
    assert EVIL not in text


async def test_a_row_per_model_and_device_as_json(site: Site) -> None:
    visitor = await site.visitor()
    assert (await visitor.get("/devices.json")).json() == {"facts": {"devices": []}, "rows": []}
    assert "No device has several models." in (await visitor.get("/devices")).text
    await write_device(site, AWAKE, ASLEEP)
    content = (await visitor.get("/devices.json")).json()
    rows = {row["model"]: row for row in content["rows"]}
    assert (rows["chat"]["state"], rows["chat"]["device_bytes"], rows["chat"]["lateness"]) == ("awake", 4 * GIB, None)
    assert (rows["coder"]["state_words"], rows["coder"]["device_bytes"]) == ("asleep 1", GIB)
    assert (rows["coder"]["lateness"], rows["coder"]["wake_s"]) == (1.25, 1.5)
    assert content["facts"]["devices"][0]["used_bytes"] == 5 * GIB


async def test_a_phase_of_a_newer_version_is_shown_as_it_is(site: Site) -> None:
    await write_device(site, DeviceModel(name="chat", phase="moving"), last_swap=SwapRecord(at=0, reason="new"))
    text = (await (await site.visitor()).get("/devices")).text
    assert '<span class="light warn">moving</span>' in text


async def test_the_page_of_a_queue_says_when_its_model_is_ready(site: Site) -> None:
    visitor, homes = await site.visitor(), Homes(site.connection, site.keys.model("m"))

    async def read() -> str:
        text = (await visitor.get("/queue?model=m")).text
        return text.partition('<dd data-figure="readiness">')[2].partition("<")[0]

    assert await read() == "no engine"
    await homes.renew("gpu0", SleepLevel.HOST_MEMORY, 4.0, lease_ttl_ms=LONG_MS)
    assert await read() == "asleep, ready in about 4.0 s"
    await homes.renew("gpu0", SleepLevel.DISK, 40.0, lease_ttl_ms=LONG_MS)
    assert await read() == "on disk, ready in about 40 s"
    await site.broker.claim("host-1-0", EngineCapacity(max_num_seqs=1), lease_ttl_ms=LONG_MS)
    assert await read() == "loaded"
