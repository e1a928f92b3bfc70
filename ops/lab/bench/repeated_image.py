"""What an image costs that comes again: ``python -m penstock.ops.lab.bench.repeated_image``.

A random LLaVA with a text model of 135M parameters and a tower of 86M is served on this machine. Each round shows a new
image, and then asks something else about the same one: three times with all caches, and once after each of them was
forgotten. Told is the time to the first token over that of the new image, as medians of rounds.
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
    """Print the ratios, and seconds for who wants to know what they are of."""
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
                continue  # imports, and what else is there only once
            firsts.append(first)
            for name, seconds in times.items():
                ratios.setdefault(name, []).append(seconds / first)
    print(f"time to the first token of a new image: {statistics.median(firsts):.3f} s")
    for name, found in ratios.items():
        print(f"{name}: {statistics.median(found):.2f} of it ({min(found):.2f} to {max(found):.2f})")


async def ttft_s(client: Client, image: Any, question: str) -> float:
    prompt = {"prompt": f"<image>{question}", "multi_modal_data": {"image": image}}
    started = time.perf_counter()
    async for _ in client.stream(prompt, PARAMS):
        break
    return time.perf_counter() - started


def noise(seed: int) -> Image.Image:
    """A picture that no other round has."""
    return Image.frombytes("RGB", (SIDE, SIDE), random.Random(seed).randbytes(3 * SIDE * SIDE))


if __name__ == "__main__":
    main()
