"""``python -m penstock.ops.lab.bench.real_file FILE``: start, memory, speed and quality for a GGUF file, in one table.

Each format of Penstock is started twice through Redis, and the second start counts: the first one fills the cache. If
the package xllamacpp can be imported (``pip install xllamacpp``), llama.cpp computes the same file in a process of its
own. It takes less than six minutes on two quiet cores. On a busy machine the processor time of a start says more than
its wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import psutil
from rich.console import Console
from rich.table import Table

from ....worker.engine.offline.quality import Quality
from ....worker.models.checks.kl_limits import QUALITY_TEXT
from ...local.stack import LocalStack
from .engines.quality import NUM_CHARACTERS
from .engines.served import run_served
from .result import PhaseResult
from .workload import Item, Phase

_PEER = Path(__file__).parent / "peers" / "xllama_file.py"
_FORMATS = ("auto", "int8", "int4-mixed", "int4")
_SEED = 0
_MIB = 1 << 20
# Ids below it are tokens in every vocabulary of a real model.
_TOKEN_IDS = 1000
_LENGTHS = (512, 128)
_NUM_STREAMS, _SHORT_PROMPT = 8, 32


class FileFigures(msgspec.Struct, kw_only=True):
    """Figures of one side.

    Args:
        start_s: processor time of the start.
        memory_bytes: of all processes; each shared page counts once.
        prompt_rate, rate: tokens/s of a prompt, and of one stream after its first token.
        rate_of_all: tokens/s of ``NUM_STREAMS`` streams at a time, from the first prompt to the last token.
        kl: divergence from float32 in nats per token; None if not measured.
    """

    name: str
    ready_s: float
    start_s: float
    memory_bytes: int
    prompt_rate: float
    rate: float
    rate_of_all: float
    kl: float | None = None


def measure_penstock(model: Path, quantization: str, lengths: tuple[int, int], kl: float | None) -> FileFigures:
    """Measure the second start of ``worker start`` with ``model``, and streams through Redis."""
    options = ["--log-level", "warning", "--device", "cpu", "--max-model-len", str(sum(lengths))]
    options += [] if quantization == "auto" else ["--quantization", quantization]
    with LocalStack(model, options):
        pass
    num_prompt, num_output = lengths
    prompts = random.Random(_SEED)
    sizes = (num_prompt,) * 3 + (_SHORT_PROMPT,) * _NUM_STREAMS
    items = [Item([prompts.randrange(_TOKEN_IDS) for _ in range(size)], max_tokens=num_output) for size in sizes]
    with LocalStack(model, options) as stack:
        processes = _tree([stack.workers[0].pid])
        start_s = sum(sum(process.cpu_times()[:2]) for process in processes)
        # The first request of each kind writes to memory for the first time.
        phases = [
            Phase("first", items[:1], 1),
            Phase("one", items[1:3], 1),
            Phase("all", items[3:], _NUM_STREAMS),
        ]
        _, timed, of_all = asyncio.run(run_served(stack.url, phases))
        memory = sum(proportional_bytes(process.pid) for process in processes)
        ready_s = stack.ready_time_s
    prompt_s, token_s = _times_of(timed)
    return FileFigures(
        name="Penstock" if quantization == "auto" else f"Penstock, {quantization}",
        ready_s=ready_s,
        start_s=start_s,
        memory_bytes=memory,
        prompt_rate=num_prompt / prompt_s,
        rate=1 / token_s,
        rate_of_all=sum(map(len, of_all.output_token_ids)) / of_all.wall_s,
        kl=kl,
    )


def measure_divergences(model: Path, scratch: Path) -> dict[str, float]:
    """Return the divergence from float32 of all formats of weights. That of the file is "auto"."""
    text = scratch / "quality.txt"
    text.write_text(QUALITY_TEXT.read_text(encoding="utf-8")[:NUM_CHARACTERS])
    command = [sys.executable, "-m", "penstock.worker.engine.offline.quality", str(model), "--json"]
    command += ["--reference", "float32", "--text", str(text)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    formats = msgspec.json.decode(output, type=Quality).formats
    own = {each.weights: each.kl for each in formats if each.kv_cache == "bfloat16" and each.kl is not None}
    return {"auto" if name == "gguf" else name: kl for name, kl in own.items()}


def measure_llama(model: Path, lengths: tuple[int, int]) -> FileFigures | None:
    """Measure llama.cpp in a process of its own; None if xllamacpp is not installed."""
    if importlib.util.find_spec("xllamacpp") is None:
        return None
    command = [sys.executable, str(_PEER), str(model), *map(str, (*lengths, _NUM_STREAMS, _SHORT_PROMPT))]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    return msgspec.json.decode(output.splitlines()[-1], type=FileFigures)


def proportional_bytes(pid: int) -> int:
    """Return the resident memory of a process, in which a page that n processes share counts as its nth part."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    match = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def _tree(pids: list[int]) -> list[psutil.Process]:
    roots = [psutil.Process(pid) for pid in pids]
    return [process for root in roots for process in (root, *root.children(recursive=True))]


def _times_of(phase: PhaseResult) -> tuple[float, float]:
    """Return the least time until a first token, and the least mean time between tokens."""
    firsts, steps = [], []
    for sent_s, times_s in zip(phase.sent_s, phase.token_times_s, strict=True):
        firsts.append(times_s[0] - sent_s)
        steps.append((times_s[-1] - times_s[0]) / (len(times_s) - 1))
    return min(firsts), min(steps)


def table_of(rows: list[FileFigures], model: Path) -> Table:
    """Return the table of all sides, with the memory as a multiple of the file's size."""
    size = model.stat().st_size
    table = Table(title=f"{model.name}, {size / 1e6:.0f} MB")
    table.add_column("side")
    rates = ("prompt tok/s", "tok/s", f"of {_NUM_STREAMS} streams")
    for column in ("ready, s", "start, CPU s", "memory, MiB", "of the file", *rates, "KL"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.ready_s:.1f}",
            f"{row.start_s:.1f}",
            f"{row.memory_bytes / _MIB:.0f}",
            f"{row.memory_bytes / size:.1f}",
            f"{row.prompt_rate:.0f}",
            f"{row.rate:.0f}",
            f"{row.rate_of_all:.0f}",
            "-" if row.kl is None else f"{row.kl:.4f}",
        )
    return table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="penstock.ops.lab.bench.real_file", description=__doc__)
    parser.add_argument("file", type=Path, help="GGUF file")
    parser.add_argument("--formats", default=",".join(_FORMATS), help="formats of the weights, with commas")
    parser.add_argument("--lengths", default="{},{}".format(*_LENGTHS), help="tokens of prompt and output")
    arguments = parser.parse_args()
    num_prompt, num_output = map(int, arguments.lengths.split(","))
    with tempfile.TemporaryDirectory() as scratch:
        divergences = measure_divergences(arguments.file, Path(scratch))
    rows = [
        measure_penstock(arguments.file, name, (num_prompt, num_output), divergences.get(name))
        for name in arguments.formats.split(",")
    ]
    rival = measure_llama(arguments.file, (num_prompt, num_output))
    Console().print(table_of(rows if rival is None else [*rows, rival], arguments.file))


if __name__ == "__main__":
    main()
