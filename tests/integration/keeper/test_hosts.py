"""Two workers with the same models, as on two hosts: one loads a model, and the other takes over if it dies."""

from __future__ import annotations

import asyncio

import pytest

from penstock.producer import Client
from penstock.shared.broker import Demand, Homes
from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys

from ...processes import DEADLINE_S
from .conftest import PARAMS, ShareDevice

pytestmark = pytest.mark.slow
PROMPT = "count from four to nine:"


async def test_one_of_two_hosts_loads_a_model_and_the_other_one_when_it_dies(
    share_device: ShareDevice, commands: CommandConnection, redis_url: str, namespace: str
) -> None:
    homes = Homes(commands, Keys(namespace).model("a"))

    async def until_granted(but: tuple[str, ...] = ()) -> Demand:
        while (demand := await homes.demand()).grants in ((), but):
            await asyncio.sleep(0.005)
        return demand

    async with asyncio.timeout(DEADLINE_S), Client.connect(redis_url, namespace=namespace) as client:
        workers = [await share_device("a", "b", "--load-at-start", "none") for _ in range(2)]
        while len((await homes.demand()).homes) < 2:
            await asyncio.sleep(0.02)
        answer = asyncio.create_task(client.generate(PROMPT, PARAMS, model="a"))
        first = await until_granted()
        (device,) = first.grants
        loading = next(worker for worker in workers if f"-{worker.started.process.pid}-" in device)
        loading.started.note_processes()
        loading.started.process.kill()
        (other,) = (await until_granted(first.grants)).grants
        assert other != device
        assert (await answer).outputs[0].text
