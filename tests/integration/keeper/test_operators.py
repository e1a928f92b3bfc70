"""Operators wake, unload and pin models that share a device, by commands and by calls to engines."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from penstock.producer import Client
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.audit import Audit
from penstock.shared.keys import Keys
from penstock.shared.messages.devices import ModelPhase

from ...processes import DEADLINE_S
from ..supervisor.conftest import run_worker
from .conftest import PARAMS, ShareDevice, texts_of

pytestmark = pytest.mark.slow


async def test_an_operator_decides_which_models_are_awake(
    share_device: ShareDevice, commands: CommandConnection, redis_url: str, namespace: str
) -> None:
    where = ("--namespace", namespace)
    async with asyncio.timeout(DEADLINE_S), Client.connect(redis_url, namespace=namespace) as client:
        worker = await share_device("a", "b")
        expected = await texts_of(client, ["two plus two is"], ["a"])

        loaded = await asyncio.to_thread(run_worker, "models", "--load", "b", *where)
        assert loaded.returncode == 0, loaded.stderr
        assert " b      awake" in loaded.stdout
        assert (await worker.model("a")).phase == ModelPhase.ASLEEP

        # A call to sleep holds the model, whatever waits for it, until a call to wake up.
        (state,) = (await client.sleep(2, model="b")).values()
        assert state.is_sleeping
        await worker.until("b", lambda model: model.is_kept_asleep)
        waiting = asyncio.create_task(client.generate("two plus two is", PARAMS, model="b"))
        assert await texts_of(client, ["two plus two is"], ["a"]) == expected
        assert not waiting.done()
        (state,) = (await client.wake_up(model="b")).values()
        assert not state.is_sleeping
        assert (await waiting).outputs[0].text == expected[0]

        pinned = await asyncio.to_thread(run_worker, "models", "--pin", "a", *where)
        assert "pinned" in pinned.stdout
        # A pinned model that dies wakes without a request.
        dead = await worker.beat("a")
        os.kill(dead.worker_pid, signal.SIGKILL)
        await worker.beat("a", lambda beat: beat.worker_pid != dead.worker_pid)
        await worker.until("a", lambda model: model.phase == ModelPhase.AWAKE)
        for action in ("load", "pin"):
            refused = await asyncio.to_thread(run_worker, "models", f"--{action}", "b", *where)
            assert f"{action} of b was refused: " in refused.stderr
            assert "does not fit beside pinned models" in refused.stderr
        await worker.await_event("model_command_refused", model="b")
        assert not (await worker.model("b")).is_pinned
        unpinned = await asyncio.to_thread(run_worker, "models", "--unpin", "a", *where)
        assert unpinned.returncode == 0, unpinned.stderr
        assert await texts_of(client, ["two plus two is"], ["b"]) == expected
        unknown = await asyncio.to_thread(run_worker, "models", "--unload", "z", *where)
        assert "no device of any worker has a model 'z'; there are a, b" in unknown.stderr
        entries = await Audit(commands, Keys(namespace)).read()
        actions = [(entry.action, entry.target, entry.result) for entry in entries]
        assert ("model.pin", "a", "ok") in actions
        assert ("engine.sleep", "b", "ok") in actions


async def test_a_model_pinned_while_it_is_awake_makes_room_for_another(
    share_device: ShareDevice, redis_url: str, namespace: str
) -> None:
    where = ("--namespace", namespace)
    async with asyncio.timeout(DEADLINE_S), Client.connect(redis_url, namespace=namespace) as client:
        # Alone, a model gets a cache of 256 MiB. Two of these do not fit, but two of 186 MiB do.
        worker = await share_device("a", "b", "--device-memory", "640MiB", "--dtype", "float32", "--max-num-seqs", "64")
        expected = await texts_of(client, ["two plus two is"], ["a"])
        alone = (await worker.model("a")).awake_bytes
        pinned = await asyncio.to_thread(run_worker, "models", "--pin", "a", *where)
        assert pinned.returncode == 0, pinned.stderr
        assert await texts_of(client, ["two plus two is"], ["b"]) == expected
        model = await worker.until("a", lambda model: model.phase == ModelPhase.AWAKE and model.awake_bytes < alone)
        assert model.is_pinned
        assert await texts_of(client, ["two plus two is"], ["a"]) == expected
