"""Other weights while requests run: none is lost, no token comes twice, and each names the weights of its tokens."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.ops.demo.run import MODEL
from penstock.producer import Client, EngineCallError, SamplingParams
from penstock.shared import errors

from ..gate import Gate
from ..processes import DEADLINE_S
from .conftest import Start
from .watching import (
    LONG,
    PROMPT,
    Watched,
    all_under_way,
    beating,
    busiest,
    engines,
    finish,
    start_streams,
    undisturbed,
)

SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with other numbers."""
    folder = tmp_path_factory.mktemp("weights") / "other"
    shutil.copytree(MODEL, folder)
    generator = torch.Generator().manual_seed(3)
    weights = load_file(MODEL / "model.safetensors")
    changed = {
        name: tensor + tensor.std() * torch.randn(tensor.shape, generator=generator) if tensor.ndim > 1 else tensor
        for name, tensor in weights.items()
    }
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    return folder


def by_transformers(folder: Path, token_ids: list[int], num_tokens: int) -> list[int]:
    """Return the greedy continuation of ``token_ids``."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # As ``ignore_eos``: it ends nothing, and may come.
    model.generation_config.eos_token_id = None
    generated_ids = model.generate(torch.tensor([token_ids]), do_sample=False, max_new_tokens=num_tokens)
    return generated_ids[0, len(token_ids) :].tolist()


def versions(watched: Watched) -> list[str]:
    return [delta.weights_version for delta in watched.deltas if delta.weights_version]


async def test_a_rolling_reload_lets_running_requests_end_on_their_weights(
    start: Start, gate: Gate, other: Path
) -> None:
    stack = await start(1, "--engines", "2", "--weights-version", "one")
    async with Client.connect(stack.url) as client:
        prompt = list((await client.tokenize(PROMPT)).token_ids)
        before = (await client.generate(PROMPT, SHORT)).outputs[0]
        assert before.weights_version == "one"
        whole, watched = await start_streams(client, gate, times=2)
        changing = asyncio.create_task(
            client.reload_weights(str(other), version="two", drain_timeout_s=300, timeout_s=300)
        )
        # An engine serves meanwhile, whichever one is changing.
        meanwhile = await asyncio.gather(*(client.generate(PROMPT, SHORT) for _ in range(6)))
        assert not changing.done()
        gate.open()
        answers = await changing
        assert [(a.former_version, a.version, a.path) for a in answers.values()] == [("one", "two", str(other))] * 2
        await asyncio.gather(*(one.task for one in watched))
        for one, expected in zip(watched, whole, strict=True):
            one.check(expected)
            assert versions(one) == ["one"]
        after = by_transformers(other, prompt, 12)
        for output in (one.outputs[0] for one in meanwhile):
            assert list(output.token_ids) == (list(before.token_ids) if output.weights_version == "one" else after)
        for one in await asyncio.gather(*(client.generate(PROMPT, SHORT) for _ in range(6))):
            assert (list(one.outputs[0].token_ids), one.outputs[0].weights_version) == (after, "two")
        assert {beat.weights_version for beat in await beating(stack.url, 2)} == {"two"}
        assert [card.weights_version for card in (await client.models()).values()] == ["two"]


async def test_running_requests_resume_with_new_weights_after_their_last_token(
    start: Start, gate: Gate, other: Path
) -> None:
    """And an engine that dies afterwards begins its next life with them."""
    stack = await start(1, "--engines", "2", "--weights-version", "one")
    num_before = LONG // 2
    async with Client.connect(stack.url) as client:
        prompt = list((await client.tokenize(PROMPT)).token_ids)
        whole = (await undisturbed(client, [GREEDY]))[0]
        gate.hold_at(num_before)
        watched = [Watched(client.stream(PROMPT, GREEDY)) for _ in range(6)]
        await all_under_way(watched, num_before)
        await client.reload_weights(str(other), version="two", mode="keep")
        assert not any(one.task.done() for one in watched)
        gate.open()
        await asyncio.gather(*(one.task for one in watched))
        token_ids = list(whole.token_ids[:num_before])
        expected = token_ids + by_transformers(other, prompt + token_ids, LONG - num_before)
        assert expected != list(whole.token_ids)
        for one in watched:
            assert [token_id for delta in one.deltas for token_id in delta.token_ids] == expected
            assert [delta.index for delta in one.deltas if delta.weights_version] == [0, num_before]
            assert versions(one) == ["one", "two"]
            assert [delta.finished for delta in one.deltas].count(True) == 1
        beat = (await beating(stack.url, 2))[0]
        os.kill(beat.core_pid, signal.SIGKILL)
        await until_restarted(stack.url, beat.engine_id)
        for engine_id in {beat.engine_id for beat in await beating(stack.url, 2)}:
            assert (await client.reload_weights(only_check=True, engine_id=engine_id))[
                engine_id
            ].former_version == "two"
        for one in await asyncio.gather(*(client.generate(PROMPT, GREEDY) for _ in range(6))):
            assert list(one.outputs[0].token_ids) == by_transformers(other, prompt, LONG)


async def until_restarted(url: str, engine_id: str) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not any(
            beat.engine_id == engine_id and beat.num_restarts == 1 and beat.state in ("ready", "busy")
            for beat in await engines(url)
        ):
            await asyncio.sleep(0.05)


async def test_no_engine_changes_if_one_cannot_or_a_request_does_not_end(
    start: Start, gate: Gate, other: Path, tmp_path: Path
) -> None:
    """Then the weights stay, and so does the request."""
    broken = tmp_path / "broken"
    shutil.copytree(other, broken)
    (broken / "model.safetensors").write_bytes(b"no such file, but a web page")
    stack = await start(1, "--engines", "2", "--weights-version", "one", "--load-timeout", "5")
    async with Client.connect(stack.url) as client:
        whole, watched = await start_streams(client, gate)
        with pytest.raises(EngineCallError, match="is no safetensors file") as caught:
            await client.reload_weights(str(broken))
        first = min(caught.value.errors)
        assert not caught.value.answers
        busy = (await busiest(stack.url)).engine_id
        with pytest.raises(EngineCallError, match=r"still run after 0.2 s") as caught:
            await client.reload_weights(str(other), drain_timeout_s=0.2, engine_id=busy)
        assert isinstance(caught.value.errors[busy], errors.EngineTimeoutError)
        # A folder whose bytes never come: the core hangs, and is replaced by one with the weights that it had.
        (broken / "model.safetensors").unlink()
        (broken / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
        os.mkfifo(broken / "part.safetensors")
        with pytest.raises(EngineCallError, match="engine") as caught:
            await client.reload_weights(str(broken), engine_id=first)
        assert isinstance(caught.value.errors[first], errors.EngineDeadError)
        await until_restarted(stack.url, first)
        await finish(watched, whole, gate)
        assert {beat.weights_version for beat in await beating(stack.url, 2)} == {"one"}
