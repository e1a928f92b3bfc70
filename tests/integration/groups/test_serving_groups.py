"""Groups of real workers: requests through Redis, ranks that are killed and stopped, groups that grow and shrink."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.producer import Client, SamplingParams
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import EngineHeartbeat
from penstock.shared.errors import GroupSizeError
from penstock.shared.keys import Keys

from ...gate import Gate
from ...warm_python import light_python
from ..supervisor.conftest import DEADLINE_S, StartWorker, run_worker

pytestmark = pytest.mark.slow

VOCAB_SIZE = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
NUM_REQUESTS, NUM_TOKENS = 12, 20
OPTIONS = ("--device", "cpu", "--max-num-seqs", "4", "--stall-timeout", "10")


@pytest.fixture(scope="session")
def moe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random mixture of six experts."""
    folder = tmp_path_factory.mktemp("moe") / "model"
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**SHAPE)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    vocabulary = {f"<{i}>": i for i in range(VOCAB_SIZE)}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<0>"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture
async def client(redis_url: str, namespace: str) -> AsyncIterator[Client]:
    async with Client.connect(redis_url, namespace=namespace) as client:
        yield client


def prompts() -> list[list[int]]:
    return [[3 + (7 * number + 5 * place) % 120 for place in range(3 + number)] for number in range(NUM_REQUESTS)]


async def generate(client: Client, prompt: list[int], adapter: str | None = None) -> list[int]:
    """Each delta is checked: none comes twice, none is missing."""
    tokens: list[int] = []
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    async for delta in client.stream({"prompt_token_ids": prompt}, params, model="demo", lora_request=adapter):
        assert delta.index == len(tokens)
        tokens += delta.token_ids
    return tokens


def write_adapter(folder: Path) -> Path:
    """Write an adapter that changes the queries of both layers."""
    generator = torch.Generator().manual_seed(1)
    rows = SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    shapes = {"lora_A": (4, SHAPE["hidden_size"]), "lora_B": (rows, 4)}
    save_file(
        {
            f"base_model.model.model.layers.{layer}.self_attn.q_proj.{name}.weight": torch.randn(
                shape, generator=generator
            )
            for layer in range(SHAPE["num_hidden_layers"])
            for name, shape in shapes.items()
        },
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged_answers(model_folder: Path, adapter: Path) -> list[list[int]]:
    """Return transformers' answers with the adapter added to the weights."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    for name, matrix in load_file(adapter / "adapter_model.safetensors").items():
        if name.endswith("lora_B.weight"):
            down = load_file(adapter / "adapter_model.safetensors")[name.replace("lora_B", "lora_A")]
            model.get_submodule(name.split(".lora_B")[0].removeprefix("base_model.model.")).weight.data += matrix @ down
    options = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
    return [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts()[:4]]


async def running_everywhere(client: Client, gate: Gate) -> list[asyncio.Task[list[int]]]:
    """Requests that all run, and are held after ten tokens."""
    gate.hold_at(10)
    running = [asyncio.create_task(generate(client, prompt)) for prompt in prompts()]
    async with asyncio.timeout(DEADLINE_S):
        while not (found := await beats(client)) or sum(b.num_running_reqs for b in found.values()) < 4 * len(found):
            await asyncio.sleep(0.05)
    return running


async def beats(client: Client) -> dict[int, EngineHeartbeat]:
    """Return the heartbeats of the engines that are in a group, by rank."""
    engines = await client.engines()
    return {beat.group.rank: beat for beat in engines if beat.group is not None}


async def until_serving(client: Client, size: int, after: int = 0) -> int:
    """Wait for a generation of that many ranks later than ``after``, all between two waves; returns it."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = await beats(client)
            groups = [beat.group for beat in found.values() if beat.group is not None]
            generations = {group.generation for group in groups}
            ready = all(beat.state in ("ready", "busy") for beat in found.values())
            if len(found) == size and len(generations) == 1 and min(generations) > after and ready:
                return generations.pop()
            await asyncio.sleep(0.05)


async def core_of(client: Client, rank: int) -> psutil.Process:
    return psutil.Process((await beats(client))[rank].core_pid)


async def test_ranks_die_and_no_token_is_lost_or_other(
    start_worker: StartWorker,
    client: Client,
    commands: CommandConnection,
    namespace: str,
    moe_folder: Path,
    gate: Gate,
    tmp_path: Path,
) -> None:
    options = (*OPTIONS, "--enable-lora", "--speculative", "ngram:3", "--engines", "3", "--data-parallel-size", "3")
    worker = start_worker(*options, model=moe_folder)
    worker.await_ready()
    generation = await until_serving(client, 3)
    adapter = write_adapter(tmp_path)
    await client.add_lora("queries", str(adapter), model="demo")
    adapted = [generate(client, prompt, "queries") for prompt in prompts()[:4]]
    adapted_answers = await asyncio.gather(*adapted, *(generate(client, prompt) for prompt in prompts()[4:]))
    assert adapted_answers[:4] == await asyncio.to_thread(merged_answers, moe_folder, adapter)
    expected = await asyncio.gather(*(generate(client, prompt) for prompt in prompts()))
    assert {len(tokens) for tokens in expected} == {NUM_TOKENS}

    listed = run_worker("list", "--namespace", namespace).stdout
    assert "0/3, wave" in listed

    for number in (signal.SIGKILL, signal.SIGSTOP):
        running = await running_everywhere(client, gate)
        (await core_of(client, 1)).send_signal(number)
        gate.open()
        assert await asyncio.gather(*running) == expected
        generation = await until_serving(client, 3, after=generation)
    # Nobody was to blame for the deaths of the others.
    lost = [event for event in worker.events if event["event"] == "engine_lost"]
    assert len(lost) >= 6
    assert all(event["is_external"] for event in lost)
    assert await commands.execute("ZCARD", Keys(namespace).model("demo").dead) == 0


def scale_by_command(size: int, namespace: str) -> subprocess.CompletedProcess[str]:
    command = [light_python(), "-m", "penstock.ops.cli", "engine", "scale", str(size), "--namespace", namespace]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


async def test_ranks_recover_while_another_engine_stands_by(
    start_worker: StartWorker, client: Client, moe_folder: Path, gate: Gate
) -> None:
    """A standby engine serves only when needed, and a worker with engines that do not serve yet keeps running."""
    group = ("--data-parallel-group", "big", "--data-parallel-address", "127.0.0.1")
    worker = start_worker(*OPTIONS, "--engines", "3", "--data-parallel-size", "2", *group, model=moe_folder)
    async with asyncio.timeout(DEADLINE_S):
        while not any(event["event"] == "engine_ready" for event in worker.events):
            await asyncio.sleep(0.05)
    generation = await until_serving(client, 2)
    (await core_of(client, 1)).send_signal(signal.SIGKILL)
    generation = await until_serving(client, 2, after=generation)
    for size in (1, 2, 3):
        await client.scale_elastic_ep(size)
        generation = await until_serving(client, size, after=generation)
    worker.await_ready()
    assert len(await generate(client, prompts()[0])) == NUM_TOKENS


async def test_a_group_shrinks_and_grows_under_load(
    start_worker: StartWorker, client: Client, namespace: str, moe_folder: Path, gate: Gate
) -> None:
    worker = start_worker(*OPTIONS, "--engines", "3", "--data-parallel-size", "3", model=moe_folder)
    worker.await_ready()
    await until_serving(client, 3)
    expected = await asyncio.gather(*(generate(client, prompt) for prompt in prompts()))
    with pytest.raises(GroupSizeError, match="has 3 engines"):
        await client.scale_elastic_ep(6)
    with pytest.raises(GroupSizeError, match="does not divide the 6 experts"):
        await client.scale_elastic_ep(4)
    for size in (2, 3):
        running = await running_everywhere(client, gate)
        # Held requests are handed back as others are, and held by the next generation.
        if size == 3:
            assert [rank.rank for rank in await client.scale_elastic_ep(size)] == [0, 1, 2]
        else:
            scaled = await asyncio.to_thread(scale_by_command, size, namespace)
            assert scaled.returncode == 0, scaled.stderr
            assert all(f"-0 {rank}/2" in scaled.stdout for rank in range(2))
        gate.open()
        assert await asyncio.gather(*running) == expected
    assert [rank.size for rank in await client.scale_elastic_ep(3)] == [3, 3, 3]
    # In order: no engine was lost for another reason than that it left with the others.
    assert not any(event["event"] == "core_requests_reclaimed" for event in worker.events)
