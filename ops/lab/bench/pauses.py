"""Pauses of event loops caused by long prompts: ``python -m penstock.ops.lab.bench.pauses``.

A gateway and a worker of the demo model get one long prompt after the other, as a chat and as a completion. Meanwhile
two probes run, one call after the other. The event loop of the gateway answers GET /health. The event loop of the
worker process tokenizes one digit, without its engine. The longest answer bounds the longest pause of the loop. The
engine computes none of the prompts, since each is longer than the model's limit. Only tokenization shows that, because
the vocabulary of the copied model has one token of a million characters.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ....producer import Client
from ...demo.run import MODEL
from ...local.server import LocalGateway
from ...local.stack import LocalStack

OPTIONS = ["--device", "cpu", "--served-model-name", "demo", "--threads", "1", "--log-level", "error"]
# The last one is the largest that the gateway takes, 4 MiB, but for the rest of the body.
NUM_CHARS = (400_000, 2_000_000, 4_150_000)
LONGEST_TOKEN_CHARS = 1 << 20
PROBE_EVERY_S = 0.002
TIMEOUT_S = 600.0
TEXT = "The event loop answers other requests while 17 + 4 is tokenized, and 'streams' keep their pace. "


def main() -> None:
    parser = argparse.ArgumentParser(description="How long a long prompt holds the event loops of gateway and worker.")
    parser.add_argument("--rounds", type=int, default=3, help="of each prompt; the median counts (3)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-") as scratch:
        model = copy_model(Path(scratch) / "model")
        with (
            LocalStack(model, OPTIONS) as stack,
            LocalGateway(stack.url, ["--log-level", "error"], Path(scratch) / "gateway.log") as gateway,
        ):
            asyncio.run(measure(stack.url, gateway.base_url, args.rounds))


def copy_model(folder: Path) -> Path:
    """Return a copy of the demo model with one token so long that no prompt can be refused by its number of characters.

    Its template contains all messages; the demo's own only the last one.
    """
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<pad>", "\u00a7" * LONGEST_TOKEN_CHARS))
    return folder


async def measure(redis_url: str, gateway_url: str, num_rounds: int) -> None:
    """Print the longest answers of both probes, in ms: without a prompt, and with each."""
    print(f"{'prompt':<28}{'answered in':>12}{'gateway':>12}{'worker':>12}   (longest answer of the probe, ms)")
    async with (
        Client(redis_url, model="demo") as client,
        httpx.AsyncClient(base_url=gateway_url.removesuffix("/v1"), timeout=TIMEOUT_S) as http,
    ):
        works: dict[str, Callable[[], Awaitable[Any]]] = {"none": lambda: asyncio.sleep(2)}
        for num_chars in NUM_CHARS:
            for path, body in bodies(num_chars).items():
                works[f"{num_chars / 1e6:.1f} MB {path}"] = lambda path=path, body=body: post(http, path, body)
        for name, work in works.items():
            rounds = [await one_round(client, http, work) for _ in range(num_rounds)]
            seconds, gateway_ms, worker_ms = (sorted(column)[num_rounds // 2] for column in zip(*rounds, strict=True))
            print(f"{name:<28}{seconds:>10.2f} s{gateway_ms:>12.1f}{worker_ms:>12.1f}", flush=True)


def bodies(num_chars: int) -> dict[str, bytes]:
    """Return request bodies with a text of ``num_chars`` characters, by path."""
    text = (TEXT * (num_chars // len(TEXT) + 1))[:num_chars]
    # As an agent's conversation has it: many messages. Each has some 40 characters of its own.
    parts = [text[at : at + 2000] for at in range(0, int(num_chars * 0.97), 2000)]
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": part} for number, part in enumerate(parts)]
    return {
        "completions": msgspec.json.encode({"model": "demo", "prompt": text}),
        "chat/completions": msgspec.json.encode({"model": "demo", "messages": [{"role": "user", "content": text}]}),
        "chat/completions (many)": msgspec.json.encode({"model": "demo", "messages": messages}),
    }


async def post(http: httpx.AsyncClient, path: str, body: bytes) -> None:
    """Send a body, which is refused for its length.

    Raises:
        RuntimeError: the answer is another one.
    """
    response = await http.post(f"/v1/{path.split()[0]}", content=body, headers={"content-type": "application/json"})
    if response.status_code != 400 or "at least one output token must fit" not in response.text:
        raise RuntimeError(f"{path}: {response.status_code} {response.text[:300]}")


async def one_round(
    client: Client, http: httpx.AsyncClient, work: Callable[[], Awaitable[Any]]
) -> tuple[float, float, float]:
    """Return how many seconds ``work`` took, and the longest answers of gateway and worker meanwhile, in ms."""
    is_over = asyncio.Event()
    probes = [
        asyncio.create_task(longest_ms(lambda: http.get("/health"), is_over)),
        asyncio.create_task(longest_ms(lambda: client.tokenize("7"), is_over)),
    ]
    await asyncio.sleep(0.2)
    started_s = time.perf_counter()
    await work()
    seconds = time.perf_counter() - started_s
    is_over.set()
    gateway_ms, worker_ms = await asyncio.gather(*probes)
    return seconds, gateway_ms, worker_ms


async def longest_ms(probe: Callable[[], Awaitable[Any]], is_over: asyncio.Event) -> float:
    """Call ``probe`` again and again; return how long its longest call took."""
    longest_s = 0.0
    while not is_over.is_set():
        started_s = time.perf_counter()
        await probe()
        longest_s = max(longest_s, time.perf_counter() - started_s)
        await asyncio.sleep(PROBE_EVERY_S)
    return longest_s * 1000


if __name__ == "__main__":
    main()
