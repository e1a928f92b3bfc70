"""Adapters of a whole deployment: names through the gateway, and requests that end with the adapter they began with."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from penstock.ops.demo.run import MODEL
from penstock.ops.local.server import LocalGateway
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, EngineCallError
from penstock.shared.errors import RequestFailedError
from penstock.shared.params.lora import adapter_digest

from ..gate import Gate
from ..integration.engine.adapters.peft_folders import R4, R8, load_base, write_adapter
from ..processes import DEADLINE_S
from .conftest import Start
from .watching import LONG, PARAMS, PROMPT, Watched, all_under_way, beating, busiest, engines, finish

# So much that each says something else from the first words on, and nothing that float rounding decides.
SIZE = 0.4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of the demo model."""
    root, base = tmp_path_factory.mktemp("adapters"), load_base(MODEL)
    kinds = {"cats": R4, "dogs": R8}
    return {
        name: write_adapter(root / name, base, kind, seed=seed, size=SIZE)
        for seed, (name, kind) in enumerate(kinds.items())
    }


async def until_loaded(stack: LocalStack, digests: set[str]) -> None:
    """Until the heartbeats of all engines say that they have these, and no others."""
    async with asyncio.timeout(DEADLINE_S):
        while {frozenset(beat.lora_digests) for beat in await engines(stack.url)} != {frozenset(digests)}:
            await asyncio.sleep(0.05)


async def test_two_adapters_and_the_base_through_the_gateway(
    start: Start, folders: dict[str, Path], tmp_path: Path
) -> None:
    stack = await start(1, "--enable-lora", "--max-loras", "2")
    async with Client.connect(stack.url) as client:
        for name, folder in folders.items():
            assert list((await client.add_lora(name, folder)).values()) == [True]
        await until_loaded(stack, {await asyncio.to_thread(adapter_digest, folder) for folder in folders.values()})
        names = ["demo", *folders]
        texts = {
            name: (await client.generate(PROMPT, PARAMS[0], model=name)).text for name in names
        }  # one after the other
        assert len(set(texts.values())) == 3
        gateway = await asyncio.to_thread(LocalGateway(stack.url, [], tmp_path / "gateway.log").__enter__)
        try:
            async with httpx.AsyncClient(base_url=gateway.root_url, timeout=DEADLINE_S) as http:
                listed = (await http.get("/v1/models")).json()["data"]
                assert {model["id"]: model["parent"] for model in listed} == {
                    "demo": None,
                    "cats": "demo",
                    "dogs": "demo",
                }
                body = {"prompt": PROMPT, "temperature": 0, "max_tokens": LONG, "ignore_eos": True}
                answers = await asyncio.gather(
                    *(http.post("/v1/completions", json=body | {"model": name}) for name in names * 3)
                )
        finally:
            await asyncio.to_thread(gateway.__exit__, None, None, None)
        for name, answer in zip(names * 3, answers, strict=True):
            assert answer.status_code == 200, answer.text
            assert (answer.json()["model"], answer.json()["choices"][0]["text"]) == (name, texts[name])
        assert list((await client.remove_lora("cats")).values()) == [True]
        await until_loaded(stack, {await asyncio.to_thread(adapter_digest, folders["dogs"])})


async def test_a_request_ends_with_the_adapter_that_it_began_with(
    start: Start, gate: Gate, folders: dict[str, Path]
) -> None:
    """Its name is pointed elsewhere, and its engine killed, in the middle of it."""
    stack = await start(2, "--deterministic", "--enable-lora")
    async with Client.connect(stack.url) as client:
        await client.register_lora("pets", folders["cats"])
        outputs = [await client.generate(PROMPT, params, model="pets") for params in PARAMS]
        whole = [output.outputs[0] for output in outputs]
        gate.hold_at(LONG - 1)
        watched = [Watched(client.stream(PROMPT, params, model="pets")) for params in PARAMS]
        await all_under_way(watched)
        await client.register_lora("pets", folders["dogs"])
        os.kill((await busiest(stack.url)).core_pid, signal.SIGKILL)
        await finish(watched, whole, gate)
        other = (await client.generate(PROMPT, PARAMS[0], model="pets")).outputs[0]
        assert other.token_ids != whole[0].token_ids


async def test_a_pinned_adapter_is_loaded_by_engines_that_start(start: Start, folders: dict[str, Path]) -> None:
    stack = await start(1, "--enable-lora")
    async with Client.connect(stack.url) as client:
        await client.register_lora("pets", folders["cats"])
        assert list((await client.pin_lora("pets")).values()) == [True]
        (before,) = await beating(stack.url, 1)
        os.kill(before.core_pid, signal.SIGKILL)
        digest = await asyncio.to_thread(adapter_digest, folders["cats"])
        async with asyncio.timeout(DEADLINE_S):
            while [(beat.num_restarts, beat.lora_digests) for beat in await engines(stack.url)] != [(1, [digest])]:
                await asyncio.sleep(0.05)


async def test_a_folder_that_has_changed_is_never_computed_with(
    start: Start, folders: dict[str, Path], tmp_path: Path
) -> None:
    stack = await start(1, "--enable-lora")
    async with Client.connect(stack.url) as client:
        record, _ = await client.register_lora("pets", folders["cats"], copy_to=tmp_path)
        config = Path(record.path) / "adapter_config.json"
        changed = json.loads(await asyncio.to_thread(config.read_text)) | {"lora_alpha": 1}
        await asyncio.to_thread(config.write_text, json.dumps(changed))
        with pytest.raises(EngineCallError, match="its files have been replaced"):
            await client.add_lora("pets")
        with pytest.raises(RequestFailedError, match="its files have been replaced") as failed:
            await client.generate(PROMPT, PARAMS[0], model="pets")
        assert (failed.value.code, failed.value.retryable) == ("adapter_file", True)
