"""How fast one request could be decoded if nothing but reading weights and keys took time."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import msgspec

from .....shared.errors import ConfigurationError
from ..workload import SINGLE_OUTPUT_TOKENS, SINGLE_PROMPT_TOKENS

_SCRIPT = Path(__file__).parents[1] / "peers" / "bandwidth.py"
_BYTES_OF = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
KV_BYTES = 2


class Bandwidth(msgspec.Struct, kw_only=True):
    """Bytes of memory per second, the best of many passes of the best of three loops, named in ``loops``."""

    num_threads: int
    one_thread_gb_per_s: float
    all_threads_gb_per_s: float
    loops: str

    @property
    def best_gb_per_s(self) -> float:
        """Reference for shares: the rate of all threads, or of fewer if other load kept cores busy."""
        return max(self.one_thread_gb_per_s, self.all_threads_gb_per_s)


def measure_bandwidth() -> Bandwidth:
    """Read, copy and triad over arrays far larger than the caches, with one thread and with all.

    Raises:
        ConfigurationError: the script failed; the message has its words.
    """
    best: list[tuple[float, str]] = []
    num_threads = len(os.sched_getaffinity(0))
    for threads in (1, num_threads):
        command = [sys.executable, str(_SCRIPT), "--threads", str(threads)]
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
        if completed.returncode != 0:
            raise ConfigurationError(f"the memory bandwidth could not be measured: {completed.stderr.strip()}")
        rates: dict[str, float] = json.loads(completed.stdout)
        best.append(max((rate, loop) for loop, rate in rates.items()))
    (one, of_one), (every, of_every) = best
    return Bandwidth(
        num_threads=num_threads,
        one_thread_gb_per_s=one,
        all_threads_gb_per_s=every,
        loops=f"{of_one} with one thread, {of_every} with {num_threads}",
    )


def decode_bytes(model: Path) -> int:
    """Bytes that the decode of one token of one request reads: all weights but an embedding of its own, and its keys
    and values half-way through a request of the phase "one at a time"."""
    config = json.loads((model / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    row_bytes = KV_BYTES * config["num_key_value_heads"] * head_dim
    num_tokens = SINGLE_PROMPT_TOKENS + SINGLE_OUTPUT_TOKENS // 2
    return _weight_bytes(model) + 2 * config["num_hidden_layers"] * row_bytes * num_tokens


def _weight_bytes(model: Path) -> int:
    total = 0
    sizes: dict[str, int] = {}
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            (header_size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_size))
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                sizes[name] = (end - start) * KV_BYTES // _BYTES_OF[entry["dtype"]]
                total += sizes[name]
    # A row of the embedding is looked up; all of it is read only where it is the output layer as well.
    if any(name.startswith("lm_head.") for name in sizes):
        total -= sum(size for name, size in sizes.items() if name.endswith("embed_tokens.weight"))
    return total
