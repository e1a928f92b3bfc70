"""Gain and cost of KV offloading: ``python -m penstock.ops.lab.bench.kv_offload``.

Two deployments of one random model, with a folder for KV blocks and without, alternate. Restart: a long prompt is
computed and the engine core is killed. When another core serves, the prompt is sent again, followed by another
question. The times to the first token are compared; the tokens must be equal. Writing: a full batch of requests is
decoded, all of whose blocks are written, and the tokens per second are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from ....producer import Client, SamplingParams
from ....shared.connection import CommandConnection
from ....shared.deployment.presence import read_heartbeats
from ....shared.deployment.records import EngineHeartbeat
from ....shared.keys import Keys
from ....shared.messages.supervision import EngineState
from ....shared.process.command_line import UsageError
from ...local.stack import LocalStack

PROMPT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 1984, 16, 16
NUM_DECODED, DECODED_PROMPT_TOKENS, DECODED_TOKENS = 16, 32, 128
# Ids of every shape's vocabulary, special ones left out.
TOKEN_IDS = range(8, 400)
POLL_S, TIMEOUT_S = 0.05, 120.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
DECODED = SamplingParams(temperature=0.0, max_tokens=DECODED_TOKENS, ignore_eos=True)


def main() -> None:
    """Measure, and print ratios: with the folder over without."""
    parser = argparse.ArgumentParser(description="KV blocks beside the cache: a restart with and without, and the cost")
    parser.add_argument("--shape", default="smol135", help="a shape of penstock.ops.lab.random_model")
    parser.add_argument("--rounds", type=int, default=3, help="of each (default 3)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine")
    parser.add_argument("--ranks", type=int, default=1, help="that share each layer of the model (default 1)")
    parser.add_argument("--only", choices=("restart", "writing"), help="one of the two")
    args = parser.parse_args()
    if args.rounds < 1:
        raise UsageError(f"--rounds must be at least 1, got {args.rounds}")
    with tempfile.TemporaryDirectory(prefix="penstock-kv-") as scratch:
        model = Path(scratch) / "model"
        command = [sys.executable, "-m", "penstock.ops.lab.random_model", "--shape", args.shape]
        subprocess.run([*command, "--out", str(model)], check=True)
        options = ["--device", "cpu", "--served-model-name", "model", "--log-level", "error"]
        options += ["--threads", str(args.threads), "--max-num-seqs", str(NUM_DECODED)]
        options += ["--tensor-parallel-size", str(args.ranks)]
        offload = ["--kv-offload-dir", str(Path(scratch) / "kept"), "--kv-offload-dir-size", "4GiB"]
        with LocalStack(model, options) as without, LocalStack(model, [*options, *offload]) as with_folder:
            stacks = {"without": without, "with": with_folder}
            if args.only != "writing":
                asyncio.run(measure_restart(stacks, args.rounds))
            if args.only != "restart":
                asyncio.run(measure_writing(stacks, args.rounds))


async def measure_restart(stacks: dict[str, LocalStack], num_rounds: int) -> None:
    """Print times to the first token of a long prompt that the core before has answered."""
    random, ratios = Random(0), []
    for number in range(num_rounds):
        prompt = random.choices(TOKEN_IDS, k=PROMPT_TOKENS)
        questions = [random.choices(TOKEN_IDS, k=QUESTION_TOKENS) for _ in range(2)]
        results = {name: await ask_again(stack, prompt, questions) for name, stack in by_turns(stacks, number)}
        if results["with"][1] != results["without"][1]:
            raise SystemExit("the tokens differ: what was read is not what would have been computed")
        ratios.append(results["with"][0] / results["without"][0])
        summary = "; ".join(
            f"{name} {ttft_s * 1000:.0f} ms, {cached} cached" for name, (ttft_s, _, cached) in results.items()
        )
        print(f"restart, TTFT of {PROMPT_TOKENS + QUESTION_TOKENS} tokens: {summary}: {ratios[-1]:.3f}", flush=True)
    print(f"restart: {statistics.median(ratios):.3f} of the time without (goal 0.1), the same tokens", flush=True)


async def measure_writing(stacks: dict[str, LocalStack], num_rounds: int) -> None:
    """Print tokens a second of a full batch that decodes, every block of which is new."""
    random, ratios = Random(1), []
    for number in range(num_rounds + 1):
        prompts = [random.choices(TOKEN_IDS, k=DECODED_PROMPT_TOKENS) for _ in range(NUM_DECODED)]
        results = {name: await decode(stack, prompts) for name, stack in by_turns(stacks, number)}
        if number == 0:
            continue  # both are warm then
        ratios.append(results["with"] / results["without"])
        summary = "; ".join(f"{name} {tokens_per_s:.0f} tokens/s" for name, tokens_per_s in results.items())
        print(f"writing, {NUM_DECODED} requests that decode: {summary}: {ratios[-1]:.3f}", flush=True)
    print(f"writing: {statistics.median(ratios):.3f} of the tokens/s without", flush=True)


def by_turns(stacks: dict[str, LocalStack], number: int) -> list[tuple[str, LocalStack]]:
    """Return the stacks, in reverse order in every other round."""
    return list(stacks.items())[:: -1 if number % 2 else 1]


async def ask_again(stack: LocalStack, prompt: list[int], questions: list[list[int]]) -> tuple[float, list[int], int]:
    """Ask, kill the core, ask something else: seconds to the first token, the tokens, and how many were cached."""
    async with Client.connect(stack.url) as client:
        before = await until_serving(stack.url)
        await client.generate(prompt + questions[0], GREEDY)
        await until_written(stack.url, before)
        os.kill(before.core_pid, signal.SIGKILL)
        await until_serving(stack.url, other_than=before.core_pid)
        await client.generate(list(TOKEN_IDS[:32]), GREEDY)  # one-time costs of a process
        started, ttft_s, tokens, cached = time.perf_counter(), 0.0, list[int](), 0
        async for delta in client.stream(prompt + questions[1], GREEDY):
            tokens += delta.token_ids
            ttft_s = ttft_s or (time.perf_counter() - started if tokens else 0.0)
            cached = delta.usage.num_cached_tokens if delta.usage else cached
    return ttft_s, tokens, cached


async def decode(stack: LocalStack, prompts: list[list[int]]) -> float:
    """Return the tokens per second of all prompts together."""
    async with Client.connect(stack.url) as client:
        await until_serving(stack.url)
        started = time.perf_counter()
        await asyncio.gather(*(client.generate(prompt, DECODED) for prompt in prompts))
        return len(prompts) * DECODED_TOKENS / (time.perf_counter() - started)


async def until_serving(url: str, other_than: int = 0) -> EngineHeartbeat:
    """Wait until the engine serves in another process than ``other_than``, and return its heartbeat."""
    while True:
        beat = await heartbeat(url)
        if beat is not None and beat.core_pid not in (0, other_than) and beat.state is EngineState.READY:
            return beat
        await asyncio.sleep(POLL_S)


async def until_written(url: str, before: EngineHeartbeat) -> None:
    """Wait until no more blocks are written."""
    last = -1
    give_up_at = time.monotonic() + TIMEOUT_S
    while (beat := await heartbeat(url)) is not None and beat.stats is not None and beat.stats.kv_offload is not None:
        num_bytes = beat.stats.kv_offload.num_written_bytes
        if num_bytes == last and beat.started_at == before.started_at:
            return
        if time.monotonic() > give_up_at:
            raise TimeoutError("blocks are written without end")
        last = num_bytes
        await asyncio.sleep(2.5)  # two heartbeats


async def heartbeat(url: str) -> EngineHeartbeat | None:
    """Return the heartbeat of the engine that started last."""
    commands = CommandConnection(url)
    try:
        beats = await read_heartbeats(commands.execute, Keys())
    finally:
        await commands.close()
    # One that was killed is listed until its heartbeat ends.
    return max(beats, key=lambda beat: beat.started_at, default=None)


if __name__ == "__main__":
    main()
