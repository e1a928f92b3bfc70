"""``python -m penstock.ops.lab.bench.decoder_step``: measures the decoder's step alone, of several kinds in turn.

``--quantization``, ``--kv-cache-dtype``, ``--adapters``, ``--threads``, ``--tiles`` and ``--huge-pages`` accept several
values with commas. All combinations are measured, each in its own process, in turns of ``--turn-s`` seconds, so that a
drift of the machine's speed affects all. Per round, the ratio of the least time of a turn to that of the first kind is
computed; the output is the median over rounds.

On a machine with other load, only the CPU time of one thread is reliable.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ....shared.process.processor import this_processor

_CHILD = "penstock.ops.lab.kernels.decoder_step"
_SHAPES = "penstock.ops.lab.random_model"
_VARIED = ("quantization", "kv-cache-dtype", "adapters", "threads", "tiles", "huge-pages")
# Left out, because another environment's program may not know them.
_DEFAULTS = (("--adapters", "0"), ("--kv-cache-dtype", "auto"))
_MS = 1e3


class Kind:
    """A combination of options, in its process."""

    def __init__(self, python: str, options: list[str], name: str) -> None:
        self.name = name
        self.rounds: list[dict[str, list[float]]] = []
        self._process = subprocess.Popen(
            [python, "-m", _CHILD, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.read: dict[str, Any] = self._read_times()

    def measure(self, seconds: float) -> None:
        """Let it run for a turn."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        self.rounds.append(self._read_times())

    def least(self, what: str) -> list[float]:
        """Return the least value of each turn, in ms."""
        return [min(turn[what]) * _MS for turn in self.rounds]

    def close(self) -> None:
        self._process.communicate()

    def _read_times(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended with {self._process.wait()}")
        return json.loads(line)


def main(words: list[str] | None = None) -> int:
    """Parse the command line, or ``words``; measure, and print the table."""
    parser = argparse.ArgumentParser(prog="penstock.ops.lab.bench.decoder_step", description=__doc__)
    parser.add_argument("--shape", default="smol135", help="a shape of penstock.ops.lab.random_model")
    parser.add_argument("--config", type=Path, help="config.json of a Llama-like model, in place of a shape")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", default="none", help="of none, int8, int4")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of auto, int8")
    parser.add_argument("--adapters", default="0", help="low-rank adapters that the requests share among them")
    parser.add_argument("--rank", type=int, default=16, help="of each adapter")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--query-len", type=int, default=1, help="tokens of each request in the step")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of each request with those of the step")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--tiles", default="on", help="of on, off")
    parser.add_argument("--huge-pages", default="on", help="of on, off; of the weights")
    parser.add_argument("--against", default="", metavar="PYTHON", help="measure another environment's penstock first")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn-s", type=float, default=0.5)
    arguments = parser.parse_args(words)
    if arguments.config is not None and not arguments.config.is_file():
        parser.error(f"--config must be a model's config.json, and there is no file {arguments.config}")
    with tempfile.TemporaryDirectory() as folder:
        config = arguments.config or Path(folder) / "config.json"
        if arguments.config is None:
            command = [sys.executable, "-m", _SHAPES, "--shape", arguments.shape, "--no-weights", "--out", folder]
            subprocess.run(command, check=True)
        kinds = _kinds(arguments, config)
        for turn in range(arguments.rounds):
            for kind in kinds if turn % 2 == 0 else reversed(kinds):
                kind.measure(arguments.turn_s)
        for kind in kinds:
            kind.close()
    _print(kinds, arguments)
    return 0


def _kinds(arguments: argparse.Namespace, config: Path) -> list[Kind]:
    common = ["--config", str(config), "--dtype", arguments.dtype, "--requests", str(arguments.requests)]
    common += ["--rank", str(arguments.rank)] if arguments.adapters != "0" else []
    common += ["--query-len", str(arguments.query_len), "--seq-len", str(arguments.seq_len)]
    values = [getattr(arguments, name.replace("-", "_")).split(",") for name in _VARIED]
    kinds: list[Kind] = []
    for chosen in itertools.product(*values):
        pairs = zip((f"--{name}" for name in _VARIED), chosen, strict=True)
        options = [*common, *itertools.chain(*(pair for pair in pairs if pair not in _DEFAULTS))]
        named = [f"{name} {value}" for name, value, several in zip(_VARIED, chosen, values, strict=True) if several[1:]]
        name = ", ".join(named) or "this"
        if arguments.against:
            kinds.append(Kind(arguments.against, options, f"{name}, before"))
        kinds.append(Kind(sys.executable, options, name))
    return kinds


def _print(kinds: list[Kind], arguments: argparse.Namespace) -> None:
    tokens = arguments.requests * arguments.query_len
    console = Console(width=140)
    console.print(
        f"{this_processor()[0]}; {arguments.config or arguments.shape} in {arguments.dtype}; a step of {tokens} "
        f"tokens: {arguments.requests} requests of {arguments.seq_len} tokens, {arguments.query_len} new"
    )
    table = Table("kind", "MB read", "wall ms, least", "median", "ratio", "CPU ms, least", "median", "ratio", "GB/s")
    for kind in kinds:
        wall, cpu = kind.least("wall_s"), kind.least("cpu_s")
        num_bytes = sum(size for name, size in kind.read.items() if name.endswith("_bytes"))
        ratios = [
            statistics.median(ours / first for ours, first in zip(of_kind, of_first, strict=True))
            for of_kind, of_first in ((wall, kinds[0].least("wall_s")), (cpu, kinds[0].least("cpu_s")))
        ]
        table.add_row(
            f"{kind.name} ({kind.read['instructions']})",
            f"{num_bytes / 1e6:.4g}",
            f"{min(wall):.2f}",
            f"{statistics.median(wall):.2f}",
            f"{ratios[0]:.3f}",
            f"{min(cpu):.2f}",
            f"{statistics.median(cpu):.2f}",
            f"{ratios[1]:.3f}",
            f"{num_bytes / min(wall) / 1e6:.1f}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
