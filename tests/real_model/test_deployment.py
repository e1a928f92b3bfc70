"""SmolLM2-135M-Instruct served through Redis: stop strings, ends of turns, and a kill in the middle of answers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, FinishReason, SamplingParams

from ..faults.watching import Watched, all_under_way, busiest, finish
from ..gate import Gate
from .texts import PROMPTS

# In one lane, since an engine takes a gigabyte.
pytestmark = [pytest.mark.real_model, pytest.mark.xdist_group("real_model")]

Chat = list[dict[str, str]]


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def stack(smollm2: Path, gate: Gate) -> Iterator[LocalStack]:
    options = ["--device", "cpu", "--served-model-name", "demo", "--deterministic", "--kv-cache-memory", "256MiB"]
    with ExitStack() as entered:
        with gate.for_engines():
            stack = entered.enter_context(LocalStack(smollm2, options))
        yield stack


def chat(prompt: str) -> Chat:
    return [{"role": "user", "content": prompt}]


async def test_turns_end_by_the_models_own_token(stack: LocalStack) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=200)
    async with Client.connect(stack.url) as client:
        output = await client.generate(chat("Name the capital city of France."), params)
    assert "Paris" in output.text
    assert "<|im_end|>" not in output.text
    assert output.outputs[0].finish_reason == FinishReason.STOP


async def test_stop_strings(stack: LocalStack) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100)
    async with Client.connect(stack.url) as client:
        whole = (await client.generate(chat("List the days of the week."), params)).text
        stop = whole[20:26]
        at = whole.index(stop)
        for included in (False, True):
            stopped = SamplingParams(temperature=0.0, max_tokens=100, stop=[stop], include_stop_str_in_output=included)
            output = (await client.generate(chat("List the days of the week."), stopped)).outputs[0]
            assert output.text == whole[: at + len(stop) * included]
            assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)


async def test_answers_go_on_after_the_engine_is_killed(stack: LocalStack, gate: Gate) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)] * 8
    params += [SamplingParams(temperature=0.8, seed=seed, max_tokens=48, ignore_eos=True) for seed in range(4)]
    requests = [(chat(prompt), one) for prompt, one in zip(PROMPTS, params, strict=False)]
    assert len(requests) == 12
    async with Client.connect(stack.url) as client:
        outputs = await asyncio.gather(*(client.generate(*request) for request in requests))
        gate.hold_at(40)
        watched = [Watched(client.stream(*request)) for request in requests]
        await all_under_way(watched)
        os.kill((await busiest(stack.url)).core_pid, signal.SIGKILL)
        await finish(watched, [output.outputs[0] for output in outputs], gate)
