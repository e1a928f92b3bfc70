"""Several models on one device: swaps by demand, idle models, and models that cannot be loaded."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import pytest

from penstock.producer import Client
from penstock.shared.connection import CommandConnection
from penstock.shared.errors import ModelBrokenError, ModelTooLargeError
from penstock.shared.keys import Keys
from penstock.shared.messages.devices import ModelPhase
from penstock.shared.partitions import open_homes
from penstock.shared.queue.stats import ModelState
from penstock.shared.swap.views import SleepLevel

from ...conftest import DEMO_MODEL
from ...processes import DEADLINE_S
from .conftest import PARAMS, ShareDevice, copy_of_model, texts_of

pytestmark = pytest.mark.slow
PROMPTS = [f"{number} plus two is" for number in range(40)]


async def test_requests_of_two_models_get_the_outputs_of_a_model_alone(
    share_device: ShareDevice, redis_url: str, namespace: str
) -> None:
    async with asyncio.timeout(DEADLINE_S), Client.connect(redis_url, namespace=namespace) as client:
        worker = await share_device("a", "b")
        assert worker.started.out == "ready: models a, b on cpu; awake: a\n"
        expected = await texts_of(client, PROMPTS, ["a"])
        started_s = time.monotonic()
        assert await texts_of(client, PROMPTS, ["a", "b"]) == expected
        took_s = time.monotonic() - started_s
        # Models that have work are left within the share; an empty one at any time.
        swaps = [line for line in worker.started.events if line["event"] == "swapped"]
        late_s = sum(float(str(line["took_s"])) for line in swaps if line["reason"] in ("late", "max_wait"))
        dearest_s = max(float(str(line["took_s"])) for line in swaps)
        assert late_s <= 0.2 * took_s + 3 * 0.8 * dearest_s
        assert {line["entered"] for line in swaps} == {"a", "b"}

        # Records are written once a second.
        device = await worker.device()
        while sum(count.count for count in device.swap_counts) < len(swaps):
            device = await worker.device()
        used = sum(model.device_bytes for model in device.models)
        assert used <= device.budget_bytes == 640 << 20
        assert 0 < device.swap_share <= 1


async def test_an_idle_model_leaves_memory_and_comes_back_for_a_request(
    share_device: ShareDevice, commands: CommandConnection, redis_url: str, namespace: str
) -> None:
    async with asyncio.timeout(DEADLINE_S), Client.connect(redis_url, namespace=namespace) as client:
        worker = await share_device("a", "b", "--load-at-start", "none", "--idle-sleep", "0.1", "--idle-unload", "0.5")
        assert worker.started.out == "ready: models a, b on cpu; awake: none\n"
        # Known from the files, although no worker has loaded it.
        card = await client.get_model_config("b")
        assert (card.architecture, card.max_model_len, card.registered_at) == ("LlamaForCausalLM", 2048, 0)
        first = await texts_of(client, ["two plus two is"], ["b"])
        await worker.await_event("model_unloaded", model="b")
        await worker.until("b", lambda model: model.phase == ModelPhase.ON_DISK)
        demand = await (await open_homes(commands, Keys(namespace), "b")).demand()
        assert [home.level for home in demand.homes] == [SleepLevel.DISK]
        assert await texts_of(client, ["two plus two is"], ["b"]) == first
        assert (await client.get_model_config("b")).registered_at > 0


@pytest.mark.usefixtures("warm_python")
async def test_a_model_has_the_cache_for_one_request_or_is_too_large(
    share_device: ShareDevice, redis_url: str, namespace: str
) -> None:
    """A request of 2048 tokens takes 4 MiB. After weights and process the budgets leave 6 and 2 MiB."""
    length = ("--dtype", "float32", "--max-model-len", "2048")
    async with asyncio.timeout(DEADLINE_S), Client.connect(redis_url, namespace=namespace) as client:
        worker = await share_device("a", "b", "--device-memory", "140MiB", *length)
        expected = await texts_of(client, PROMPTS[:2], ["a"])
        # Half of the rest is for the process of the other model, which ends.
        assert await texts_of(client, PROMPTS[:2], ["b", "a"]) == expected
        await worker.await_event("model_unloaded", model="a")
        worker.started.destroy()

        worker = await share_device("a", "b", "--device-memory", "136MiB", "--load-at-start", "none", *length)
        with pytest.raises(ModelTooLargeError, match="one request of max_model_len 2048 needs 4 MiB: lower"):
            await texts_of(client, PROMPTS[:1], ["a"])
        assert len([line for line in worker.started.events if line["event"] == "wake_failed"]) == 1


async def test_a_broken_model_does_not_disturb_others_and_is_loaded_once_it_is_repaired(
    share_device: ShareDevice, redis_url: str, namespace: str, tmp_path: Path
) -> None:
    async with asyncio.timeout(DEADLINE_S), Client.connect(redis_url, namespace=namespace) as client:
        weights = copy_of_model(tmp_path, "c") / "model.safetensors"
        weights.unlink()
        # Its header is right, so that nothing is known before it is loaded.
        weights.write_bytes((DEMO_MODEL / "model.safetensors").read_bytes()[:-1000])
        worker = await share_device("c", "a", "b")
        # The first one that can be loaded serves.
        assert worker.started.out.endswith("awake: a\n")
        with pytest.raises(ModelBrokenError, match=r"model\.safetensors is damaged"):
            await client.generate("two plus two is", PARAMS, model="c")
        # The one that was awake left for it.
        await worker.await_event("swapped", left=["a"], entered="")
        event = await worker.await_event("model_broken", model="c")
        assert "model.safetensors is damaged" in str(event["cause"])
        model = await worker.until("c", lambda model: model.phase == ModelPhase.BROKEN)
        assert model.error == event["cause"]
        assert sum(model.wake_failures.values()) == 3
        readiness = (await client.queue_stats("c")).readiness
        assert (readiness.state, readiness.error) == (ModelState.BROKEN, event["cause"])
        expected = await texts_of(client, ["two plus two is"], ["b"])
        with pytest.raises(ModelBrokenError):
            await client.generate("two plus two is", PARAMS, model="c")
        shutil.copy(DEMO_MODEL / "model.safetensors", weights)
        while (await client.queue_stats("c")).readiness.error:
            await asyncio.sleep(0.02)
        assert await texts_of(client, ["two plus two is"], ["c"]) == expected
