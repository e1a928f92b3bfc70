"""vLLM's core behind our queue: its tokens, our text, deaths and ends. One deployment serves all tests of this file."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.ops.demo.run import MODEL
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client, Delta, SamplingParams, StructuredOutputsParams
from penstock.shared.errors import EngineCallError, PoisonRequestError, UnsupportedParameterError, ValidationError
from penstock.worker.text.tokenizer import TextCodec

from ..gate import Gate

PROMPTS = ("count from four to nine:", "what is seven plus eight?")
LONG = 60
REGEX = "[a-z]{3} [0-9]{12}x"
# By name, with the parameters of vLLM itself.
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 7},
    "penalties": {
        "temperature": 0.0,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "min_tokens": 20,
        "logit_bias": {17: 2.0},
    },
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "structured": {"temperature": 0.0, "structured_outputs": {"regex": REGEX}},
}
# By name of the parameters, one for each prompt.
Answers = dict[str, list[dict[str, Any]]]
pytestmark = pytest.mark.slow


def _params(values: dict[str, Any], **more: Any) -> SamplingParams:
    values = {"max_tokens": LONG, "ignore_eos": "structured_outputs" not in values, **values, **more}
    if grammar := values.get("structured_outputs"):
        values["structured_outputs"] = StructuredOutputsParams(**grammar)
    return SamplingParams(**values)


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.load(MODEL)


@pytest.fixture(scope="module")
def own_answers(
    vllm_python: str, codec: TextCodec, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """Return vLLM's own answers: by name of the parameters, one answer for each prompt."""
    requests = [
        (codec.encode(prompt), {"max_tokens": LONG, "ignore_eos": "structured_outputs" not in values, **values})
        for values in ASKED.values()
        for prompt in PROMPTS
    ]
    output = tmp_path_factory.mktemp("own") / "answers.json"
    work = {"model": str(MODEL), "requests": requests, "output": str(output)}
    script = Path(__file__).parent / "vllm_own.py"
    result = subprocess.run([vllm_python, str(script)], input=json.dumps(work), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    answers = json.loads(output.read_text())
    num = len(PROMPTS)
    return {name: answers[place * num : (place + 1) * num] for place, name in enumerate(ASKED)}


@pytest.mark.parametrize("name", ASKED)
async def test_tokens_are_vllms_own(client: Client, own_answers: Answers, name: str) -> None:
    outputs = await asyncio.gather(*(client.generate(prompt, _params(ASKED[name])) for prompt in PROMPTS))
    for request, own in zip(outputs, own_answers[name], strict=True):
        (output,) = request.outputs
        assert output.token_ids == own["token_ids"]
        assert (output.text, str(output.finish_reason)) == (own["text"], own["finish_reason"])
        for position, own_position in zip(output.logprobs or [], own["logprobs"], strict=True):
            chosen = own_position[str(position.token_id)]
            assert (position.logprob, position.rank) == (pytest.approx(chosen[0], abs=1e-5), chosen[1])
            assert {str(token_id): pytest.approx(value, abs=1e-5) for token_id, value in position.top} == {
                token_id: value for token_id, (value, rank) in own_position.items() if rank <= 3
            }


async def test_stop_strings_are_ours(client: Client) -> None:
    whole = (await client.generate(PROMPTS[0], _params(ASKED["greedy"]))).outputs[0]
    stop = whole.text[7:10]
    cut = (await client.generate(PROMPTS[0], _params(ASKED["greedy"], stop=stop))).outputs[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (str(cut.finish_reason), cut.stop_reason) == ("stop", stop)


async def test_prompt_logprobs_arrive_with_the_first_token(client: Client, codec: TextCodec) -> None:
    output = await client.generate(PROMPTS[0], _params(ASKED["greedy"], prompt_logprobs=1, max_tokens=2))
    token_ids = codec.encode(PROMPTS[0])
    assert output.prompt_logprobs is not None
    assert [None if p is None else p.token_id for p in output.prompt_logprobs][1:] == token_ids[1:]


async def test_requests_that_vllm_cannot_serve_are_refused(client: Client) -> None:
    with pytest.raises(UnsupportedParameterError, match="resume='exact'"):
        await client.generate(PROMPTS[0], _params(ASKED["seeded"]), resume="exact")
    assert (await client.generate(PROMPTS[0], _params(ASKED["greedy"], max_tokens=2), resume="exact")).finished
    with pytest.raises(ValidationError, match="vLLM refuses the request: Grammar error"):
        await client.generate(PROMPTS[0], SamplingParams(structured_outputs=StructuredOutputsParams(regex="([")))
    with pytest.raises(EngineCallError, match="sleep: vLLM's sleep mode is off"):
        await client.sleep()


async def test_profiles_and_caches_by_vllms_utilities(client: Client) -> None:
    await client.start_profile()
    await client.generate(PROMPTS[0], _params(ASKED["greedy"], max_tokens=4))
    (path,) = (await client.stop_profile()).values()
    assert Path(path).stat().st_size > 0
    assert list((await client.reset_prefix_cache()).values()) == [True]


async def test_an_abort_frees_the_engine(client: Client, gate: Gate) -> None:
    gate.hold_at(5)
    stream = client.stream(PROMPTS[0], _params(ASKED["greedy"], max_tokens=400))
    assert (await anext(stream)).token_ids
    await _until_running(client, 1)
    await stream.aclose()
    # The gate holds it, so it cannot have come to its own end.
    await _until_running(client, 0)
    gate.open()
    assert (await client.generate(PROMPTS[0], _params(ASKED["greedy"], max_tokens=4))).finished


async def _until_running(client: Client, number: int) -> None:
    """Wait for the engine's heartbeats to show running requests; they may be a second old."""
    async with asyncio.timeout(60):
        while (await client.engines())[0].num_running_reqs != number:
            await asyncio.sleep(0.05)


class Followed:
    """A stream, as its reader sees it."""

    def __init__(self, stream: AsyncIterator[Delta], num_awaited: int) -> None:
        self.deltas: list[Delta] = []
        self.has_begun = asyncio.Event()
        self.task = asyncio.create_task(self._follow(stream, num_awaited))

    async def _follow(self, stream: AsyncIterator[Delta], num_awaited: int) -> None:
        async for delta in stream:
            self.deltas.append(delta)
            if delta.next_index >= num_awaited:
                self.has_begun.set()

    def check(self, token_ids: list[int], text: str) -> None:
        """Every token once, in order, and one end."""
        assert [delta.index for delta in self.deltas] == [
            sum(len(delta.token_ids) for delta in self.deltas[:place]) for place in range(len(self.deltas))
        ]
        assert [token_id for delta in self.deltas for token_id in delta.token_ids] == token_ids
        assert "".join(delta.text for delta in self.deltas) == text
        assert [delta.finished for delta in self.deltas] == [False] * (len(self.deltas) - 1) + [True]


async def test_a_batch_that_raises_is_blamed_on_one(client: Client, gate: Gate) -> None:
    """It ends the core. Who was in it runs alone then: the poisoned one is parked at its second death."""
    whole = (await client.generate(PROMPTS[0], _params(ASKED["greedy"]))).outputs[0]
    gate.hold_at(10)
    neighbour = Followed(client.stream(PROMPTS[0], _params(ASKED["greedy"])), 5)
    await asyncio.wait_for(neighbour.has_begun.wait(), 60)
    (before,) = await client.engines()
    poisoned = asyncio.create_task(client.generate(PROMPTS[0], _params(ASKED["greedy"], logit_bias={3: 0.125})))
    # The gate holds the neighbour alone: a poisoned batch raises before it looks.
    async with asyncio.timeout(60):
        while {engine.core_pid for engine in await client.engines()} == {before.core_pid}:
            await asyncio.sleep(0.05)
    gate.open()
    with pytest.raises(PoisonRequestError):
        await asyncio.wait_for(poisoned, 600)
    await asyncio.wait_for(neighbour.task, 300)
    neighbour.check(whole.token_ids, whole.text)


async def test_requests_of_a_killed_core_are_resumed(client: Client, vllm_stack: LocalStack, gate: Gate) -> None:
    """kill -9 of the core in mid-stream: no gap, no repeat, and greedy ones (with a grammar, too) end as they would."""
    cases = [_params(ASKED["greedy"]), _params(ASKED["structured"]), _params(ASKED["seeded"])]
    whole = [(await client.generate(PROMPTS[0], params)).outputs[0] for params in cases[:2]]
    gate.hold_at(24)
    followed = [Followed(client.stream(PROMPTS[0], params), 5) for params in cases]
    await asyncio.wait_for(asyncio.gather(*(one.has_begun.wait() for one in followed)), 60)
    (engine,) = await client.engines()
    num_restarts = engine.num_restarts
    os.kill(engine.core_pid, signal.SIGKILL)
    gate.open()
    await asyncio.wait_for(asyncio.gather(*(one.task for one in followed)), 300)
    for one, answer in zip(followed, whole, strict=False):
        one.check(answer.token_ids, answer.text)
    # A random draw continues with other tokens: only their number is promised.
    seeded = followed[2]
    seeded.check([t for d in seeded.deltas for t in d.token_ids], "".join(delta.text for delta in seeded.deltas))
    assert seeded.deltas[-1].next_index == LONG
    (engine,) = await client.engines()
    assert engine.num_restarts == num_restarts + 1
    assert engine.setup is not None
    assert (engine.setup.engine, engine.setup.resume) == ("vllm", "greedy")


async def test_a_drained_engine_finishes_running_requests(client: Client, vllm_stack: LocalStack, gate: Gate) -> None:
    whole = (await client.generate(PROMPTS[1], _params(ASKED["greedy"]))).outputs[0]
    gate.hold_at(5)
    followed = Followed(client.stream(PROMPTS[1], _params(ASKED["greedy"])), 5)
    await asyncio.wait_for(followed.has_begun.wait(), 60)
    supervisor = psutil.Process(vllm_stack.workers[0].pid)
    family = supervisor.children(recursive=True)
    supervisor.send_signal(signal.SIGTERM)
    gate.open()
    await asyncio.wait_for(followed.task, 60)
    followed.check(whole.token_ids, whole.text)
    assert await asyncio.to_thread(vllm_stack.workers[0].await_end) == 0
    assert not any(process.is_running() for process in family)


def test_an_engine_that_cannot_start_gives_a_reason(tmp_path: Path) -> None:
    """An interpreter without penstock, before anything is started; needs no vLLM."""
    import sys

    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    command = [sys.executable, "-m", "penstock.worker.cli", "start", "--model", str(MODEL), "--device", "cpu"]
    command += ["--engine", "vllm", "--engine-python", str(python)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode != 0
    assert "lacks a package that a core needs" in result.stderr
    assert "Traceback" not in result.stderr
