"""Cost of a repeated image: ``python -m penstock.ops.lab.bench.repeated_image``.

A random LLaVA with a text model of 135M parameters and a vision encoder of 86M is served on this machine. Each round
sends a new image, and then other questions about it: three times with all caches, and once after each cache was
cleared. The output is the time to the first token relative to that of the new image, as medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

from ....producer import Client, SamplingParams
from ...local.stack import LocalStack

OPTIONS = ["--device", "cpu", "--served-model-name", "llava", "--log-level", "warning"]
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
SIDE = 640


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to the first token of a repeated image over that of a new one.")
    parser.add_argument("--rounds", type=int, default=7, help="new images (7)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        writer = [sys.executable, "-m", "penstock.ops.lab.random_vision_model", "--out", name]
        subprocess.run(writer, check=True, capture_output=True)
        with LocalStack(Path(name), OPTIONS) as stack:
            asyncio.run(measure(stack.url, args.rounds))


async def measure(url: str, num_rounds: int) -> None:
    """Print the ratios and the seconds behind them."""
    ratios: dict[str, list[float]] = {}
    firsts: list[float] = []
    async with Client(url) as client:
        for number in range(num_rounds + 1):
            image = noise(number)
            first = await ttft_s(client, image, "What is this?")
            times = {"again": await ttft_s(client, image, "And what is that beside it?")}
            await client.reset_prefix_cache()
            times["again, without the prefix cache"] = await ttft_s(client, image, "Who made it?")
            await client.reset_prefix_cache()
            await client.reset_encoder_cache()
            times["again, without what the tower made"] = await ttft_s(client, image, "Where?")
            if number == 0:
                continue  # imports and other one-time costs
            firsts.append(first)
            for name, seconds in times.items():
                ratios.setdefault(name, []).append(seconds / first)
    print(f"time to the first token of a new image: {statistics.median(firsts):.3f} s")
    for name, values in ratios.items():
        print(f"{name}: {statistics.median(values):.2f} of it ({min(values):.2f} to {max(values):.2f})")


async def ttft_s(client: Client, image: Any, question: str) -> float:
    prompt = {"prompt": f"<image>{question}", "multi_modal_data": {"image": image}}
    started = time.perf_counter()
    async for _ in client.stream(prompt, PARAMS):
        break
    return time.perf_counter() - started


def noise(seed: int) -> Image.Image:
    """Return a picture unique to a round."""
    return Image.frombytes("RGB", (SIDE, SIDE), random.Random(seed).randbytes(3 * SIDE * SIDE))


if __name__ == "__main__":
    main()
