"""Adapters by vLLM behind our queue: tokens of the merged models, loads at first use, and adapters that do not fit."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from penstock.ops.demo.run import MODEL
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, SamplingParams
from penstock.shared.errors import EngineCallError, RequestFailedError
from penstock.shared.params.lora import adapter_digest
from penstock.worker.text.tokenizer import TextCodec

from ..gate import Gate
from ..integration.engine.adapters.peft_folders import R4, R8, load_base, merge, write_adapter
from ..processes import DEADLINE_S
from .conftest import OPTIONS

PROMPT = "what is seven plus eight?"
NUM_TOKENS = 24
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
KINDS = {"cats": R4, "dogs": R8, "birds": R4}
# So much that each says something else from the first words on, and nothing that float rounding decides.
SIZE = 0.4
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three adapters of the demo model, and one of a model with more layers."""
    root, base = tmp_path_factory.mktemp("adapters"), load_base(MODEL)
    folders = {
        name: write_adapter(root / name, base, kind, seed=seed, size=SIZE)
        for seed, (name, kind) in enumerate(KINDS.items())
    }
    folders["deep"] = write_adapter(root / "deep", base, R4, size=SIZE)
    path = folders["deep"] / "adapter_model.safetensors"
    save_file({name.replace("layers.0.", "layers.77."): tensor for name, tensor in load_file(path).items()}, path)
    return folders


@torch.no_grad()
def _greedy(model: nn.Module, prompt: list[int]) -> list[int]:
    token_ids = list(prompt)
    for _ in range(NUM_TOKENS):
        token_ids.append(int(model(input_ids=torch.tensor([token_ids])).logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Tokens of transformers, by name of the adapter, whose matrices are merged; "demo" is the base model."""
    prompt = TextCodec.load(MODEL).encode(PROMPT)
    merged = {
        name: merge(load_base(MODEL), kind, seed=seed, size=SIZE) for seed, (name, kind) in enumerate(KINDS.items())
    }
    return {name: _greedy(model, prompt) for name, model in {"demo": load_base(MODEL), **merged}.items()}


@pytest.fixture(scope="module")
def stack(start_vllm: Callable[..., AbstractContextManager[LocalStack]]) -> Iterator[LocalStack]:
    with start_vllm(MODEL, *OPTIONS, "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "2") as stack:
        yield stack


@pytest.fixture
async def client(stack: LocalStack) -> AsyncIterator[Client]:
    async with Client.connect(stack.url) as client:
        yield client


async def _until_loaded(client: Client, folders: list[Path]) -> None:
    """Wait for the heartbeat that has these adapters, and no others."""
    digests = [await asyncio.to_thread(adapter_digest, folder) for folder in folders]
    async with asyncio.timeout(DEADLINE_S):
        while (await client.engines())[0].lora_digests != sorted(digests):
            await asyncio.sleep(0.05)


async def test_tokens_are_those_of_the_merged_models(
    client: Client, folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    assert list((await client.add_lora("cats", folders["cats"])).values()) == [True]
    await _until_loaded(client, [folders["cats"]])
    # Loaded for its first request.
    await client.register_lora("dogs", folders["dogs"])
    names = ["demo", "cats", "dogs"] * 2
    outputs = await asyncio.gather(*(client.generate(PROMPT, PARAMS, model=name) for name in names))
    assert [output.outputs[0].token_ids for output in outputs] == [expected[name] for name in names]
    assert len({tuple(tokens) for tokens in expected.values()}) == 4
    await _until_loaded(client, [folders["cats"], folders["dogs"]])
    assert list((await client.remove_lora("cats")).values()) == [True]
    await _until_loaded(client, [folders["dogs"]])


async def test_a_pinned_adapter_stays_when_another_needs_its_place(
    client: Client, folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    """Two adapters fit. The first one is used the longest ago, and the second one leaves."""
    assert list((await client.add_lora("cats", folders["cats"])).values()) == [True]
    assert list((await client.pin_lora("cats")).values()) == [True]
    for name in ("dogs", "birds"):
        await client.register_lora(name, folders[name])
        output = await client.generate(PROMPT, PARAMS, model=name)
        assert output.outputs[0].token_ids == expected[name]
    await _until_loaded(client, [folders["cats"], folders["birds"]])
    assert list((await client.remove_lora("cats")).values()) == [True]


async def test_an_adapter_that_vllm_would_apply_in_part_is_refused(client: Client, folders: dict[str, Path]) -> None:
    with pytest.raises(EngineCallError, match=r"vLLM would leave out 2 layers of the adapter.*layers\.77\."):
        await client.add_lora("deep", folders["deep"])
    await client.register_lora("deep", folders["deep"])
    with pytest.raises(RequestFailedError, match="vLLM would leave out"):
        await client.generate(PROMPT, PARAMS, model="deep")


async def test_a_request_of_a_killed_core_ends_with_its_adapter(
    client: Client, gate: Gate, folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    await client.register_lora("pets", folders["dogs"])
    gate.hold_at(12)
    stream = client.stream(PROMPT, PARAMS, model="pets")
    tokens = (await anext(stream)).token_ids
    await client.register_lora("pets", folders["cats"])
    os.kill((await client.engines())[0].core_pid, signal.SIGKILL)
    gate.open()
    async with asyncio.timeout(300):
        async for delta in stream:
            tokens += delta.token_ids
    assert tokens == expected["dogs"]
