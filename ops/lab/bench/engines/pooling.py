"""Embedding of texts by our engine alone, by the whole stack, and by transformers in padded batches.

64 clients send one text after the other. transformers gets the same texts in one call: in batches of 64 in order of
arrival, the best possible online, and sorted by length, as sentence-transformers sorts them.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from .....producer import Client
from .....shared.errors import ConfigurationError
from ....local.stack import LocalStack
from .judge import read_vocab_size

NUM_CLIENTS, NUM_TEXTS = 64, 1024
MIN_TOKENS, MAX_TOKENS = 8, 63
MIN_COSINE = 1 - 1e-5
TIMEOUT_S = 600.0


class PoolingRow(msgspec.Struct, kw_only=True):
    """Texts/s of each side by round; ``min_cosine`` is of our embeddings to those of transformers."""

    model: str
    num_texts: int
    alone: list[float] = []
    through_redis: list[float] = []
    arrival: list[float] = []
    sorted: list[float] = []
    min_cosine: float = 1.0


def measure_pooling(
    name: str,
    model: Path,
    engine_options: list[str],
    scratch: Path,
    *,
    num_texts: int = NUM_TEXTS,
    rounds: int,
    seed: int,
    threads: int,
) -> PoolingRow:
    """Measure ``rounds`` of all sides, in float32.

    Raises:
        ConfigurationError: a side failed, or its embeddings are others.
    """
    rng, vocab_size = Random(seed), read_vocab_size(model)
    lens = [rng.randint(MIN_TOKENS, MAX_TOKENS) for _ in range(num_texts)]
    texts = [[rng.randrange(5, vocab_size) for _ in range(num_tokens)] for num_tokens in lens]
    options = ["--dtype", "float32", "--max-num-seqs", str(NUM_CLIENTS), "--max-num-batched-tokens", "4096"]
    run = _Run(PoolingRow(model=name, num_texts=num_texts), model, texts, [*options, *engine_options], scratch)
    served = ["--device", "cpu", "--served-model-name", "bench", "--log-level", "warning", *run.options]
    with LocalStack(model, served) as stack:
        for number in range(rounds):
            sides = [run.alone, partial(run.served, stack.url), partial(run.rival, threads or 1)]
            for side in sides if number % 2 == 0 else sides[::-1]:
                side()
    run.compare()
    return run.row


@dataclass
class _Run:
    """The sides, which fill themselves into ``row``; ``ours`` and ``theirs`` are embeddings of the first texts."""

    row: PoolingRow
    model: Path
    texts: list[list[int]]
    options: list[str]
    scratch: Path
    ours: list[list[float]] = field(default_factory=list)
    theirs: list[list[float]] = field(default_factory=list)

    def alone(self) -> None:
        """Measure the engine without Redis, with one text per client in it."""
        workload, output = self.scratch / "pool.json", self.scratch / "pooled.json"
        phases = [self._phase("warm-up", self.texts[:NUM_CLIENTS]), self._phase("all", self.texts)]
        workload.write_bytes(msgspec.json.encode({"phases": phases}))
        command = [sys.executable, "-m", "penstock.worker.engine.offline", "--model", str(self.model), *self.options]
        _run_side([*command, "--workload", str(workload), "--output", str(output)])
        wall_s = msgspec.json.decode(output.read_bytes())["phases"][1]["wall_s"]
        self.row.alone.append(len(self.texts) / wall_s)

    def served(self, url: str) -> None:
        """Client, Redis, worker process and engine."""
        wall_s, self.ours = asyncio.run(_served(url, self.texts))
        self.row.through_redis.append(len(self.texts) / wall_s)

    def rival(self, threads: int) -> None:
        """transformers, in both orders."""
        workload, output = self.scratch / "texts.json", self.scratch / "embedded.json"
        workload.write_bytes(msgspec.json.encode(self.texts))
        script = Path(__file__).parents[1] / "peers" / "transformers_embed.py"
        _run_side([sys.executable, str(script), str(self.model), str(workload), str(output), str(threads)])
        result = msgspec.json.decode(output.read_bytes())
        self.row.arrival.append(len(self.texts) / result["arrival_s"])
        self.row.sorted.append(len(self.texts) / result["sorted_s"])
        self.theirs = result["vectors"]

    def compare(self) -> None:
        """Raises ``ConfigurationError`` if our embeddings are others."""
        pairs = zip(self.ours, self.theirs, strict=True)
        self.row.min_cosine = min(sum(a * b for a, b in zip(*pair, strict=True)) for pair in pairs)
        if self.row.min_cosine < MIN_COSINE:
            raise ConfigurationError(f"embeddings are not those of transformers: cosine {self.row.min_cosine:.6f}")

    def _phase(self, name: str, texts: list[list[int]]) -> dict[str, Any]:
        requests = [{"prompt_token_ids": ids, "pooling_params": {}} for ids in texts]
        return {"name": name, "concurrency": NUM_CLIENTS, "requests": requests}


async def _served(url: str, texts: list[list[int]]) -> tuple[float, list[list[float]]]:
    """Seconds that the clients took, and the embeddings of the first texts."""
    async with Client.connect(url) as client:

        async def ask(number: int) -> None:
            for ids in texts[number::NUM_CLIENTS]:
                await client.encode(ids)

        first = await client.encode_all(texts[:NUM_CLIENTS])
        started = time.perf_counter()
        await asyncio.gather(*map(ask, range(NUM_CLIENTS)))
        return time.perf_counter() - started, [output.outputs.vector for output in first]


def _run_side(command: list[str]) -> None:
    completed = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if completed.returncode != 0:
        raise ConfigurationError(f"{command[1]} failed: {completed.stderr.strip()[-1500:]}")
