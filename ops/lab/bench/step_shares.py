"""``python -m penstock.ops.lab.bench.step_shares``: where the processor time of an engine's steps goes.

Each kind runs in its own process: an engine without Redis whose requests all generate, with random weights unless
``--model`` names a folder. ``perf`` samples the process during its steps alone, without load and warm-up. A sample is
processor time, so the shares hardly depend on other load. With several threads "waiting" is the time in which one
waits for another by spinning.

Needs ``perf`` and the compiled kernels with their symbols.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.table import Table

from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.sampling import SamplingParams
from ....shared.process.processor import this_processor
from ....worker.config.engine_config import EngineConfig
from ....worker.engine.composition import build_engine
from ....worker.engine.core.engine_core import EngineCore
from ...local.life_line import unwind_on_sigterm

_ENGINE = "steps-of-this-engine"
_SAMPLES_PER_S = "499"
# Begin the lines of an engine; it logs others.
_READY, _DONE = "all generate", "ms per step:"
# Parts of a step by the names of functions for all processors; the first that fits. perf leaves some names mangled. The
# rest of the kernels is "norms, rotary, rest".
_PARTS = (
    ("attention", r"Attention|attend|softmax_weights|Queries|KeyRange|ScoreSpace"),
    ("rotating, quantising", r"quantize|rotate_part|rotate_stages|rotate_block|choose_step"),
    (
        "products",
        r"wide|tiles|TilePiece|Pending|Panel|Columns|multiply|for_(pieces|form)|Block[A-Z]|add_(all|block|rows)",
    ),
    ("SwiGLU", r"gate_row|activate_row"),
    ("sampling", r"[Dd]raw|sample|Philox|argmax|top_|candidates"),
    ("waiting", r"Pool::|run_items|wait_at"),
)
_REST_OF_KERNELS, _PYTHON, _TORCH, _KERNEL, _OTHER = "norms, rotary, rest", "Python", "torch", "system", "other"
COLUMNS = (*(name for name, _ in _PARTS), _REST_OF_KERNELS, _TORCH, _PYTHON, _KERNEL, _OTHER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; by default the 135M shape with random weights")
    parser.add_argument("--quantization", default="none,int8", help="none, int8, int4, with commas (none,int8)")
    parser.add_argument("--threads", default="1", help="with commas (1)")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each kind (20)")
    parser.add_argument(f"--{_ENGINE}", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if (options := getattr(arguments, _ENGINE.replace("-", "_"))) is not None:
        _run_engine(**json.loads(options))
        return
    unwind_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        model = arguments.model or _write_model(Path(folder))
        _print_shares(arguments, model, Path(folder))


def _print_shares(arguments: argparse.Namespace, model: str, folder: Path) -> None:
    title = f"processor time of steps of {arguments.requests} requests, %: {this_processor()[0]}"
    table = Table("kind", "CPU ms of a step", *COLUMNS, title=title)
    for quantization, threads in itertools.product(arguments.quantization.split(","), arguments.threads.split(",")):
        options = {
            "model": model,
            "quantization": None if quantization == "none" else quantization,
            "num_threads": int(threads),
            "num_requests": arguments.requests,
            "num_prompt_tokens": arguments.prompt_tokens,
            "temperature": arguments.temperature,
        }
        shares, step_ms = measure_shares(options, arguments.seconds, folder / "perf.data")
        name = f"{'bfloat16' if quantization == 'none' else quantization}, {threads} threads"
        table.add_row(name, f"{step_ms:.1f}", *(f"{100 * shares[column]:.1f}" for column in COLUMNS))
    Console(width=200).print(table)


def measure_shares(options: dict[str, object], seconds: float, samples: Path) -> tuple[dict[str, float], float]:
    """Return the share of each column, and the processor time of a step in ms."""
    command = [sys.executable, "-m", __spec__.name, f"--{_ENGINE}", json.dumps(options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        _words_after(_READY, engine.stdout)
        record = ["perf", "record", "-q", "-e", "cpu-clock", "-F", _SAMPLES_PER_S, "-o", str(samples)]
        with subprocess.Popen([*record, "-p", str(engine.pid)]) as perf:
            print(seconds, file=engine.stdin, flush=True)
            step_ms = float(_words_after(_DONE, engine.stdout))
            perf.terminate()
        engine.communicate()
    report = ["perf", "report", "-i", str(samples), "--stdio", "--sort", "dso,symbol", "-t", "\t", "-w", "40,400"]
    lines = subprocess.run(report, capture_output=True, text=True, check=True).stdout.splitlines()
    return shares_of(lines), step_ms


def _words_after(mark: str, output: IO[str]) -> str:
    """Return the rest of the first line that begins with ``mark``."""
    for line in output:
        if line.startswith(mark):
            return line.removeprefix(mark)
    raise RuntimeError(f"the engine has ended before it said {mark!r}")


def shares_of(lines: Sequence[str]) -> dict[str, float]:
    """Return the share of each column in the lines of ``perf report``: percent, library and symbol."""
    shares = dict.fromkeys(COLUMNS, 0.0)
    for line in lines:
        if line.startswith("#") or line.count("\t") < 2:
            continue
        percent, library, symbol = (part.strip() for part in line.split("\t", 2))
        shares[_column_of(library, symbol)] += float(percent.rstrip("%")) / 100
    return shares


def _column_of(library: str, symbol: str) -> str:
    if library.startswith("penstock"):
        return next((name for name, pattern in _PARTS if re.search(pattern, symbol)), _REST_OF_KERNELS)
    if "kernel" in library:
        return _KERNEL
    if library.startswith(("python", "libpython")):
        return _PYTHON
    return _TORCH if library.startswith(("libtorch", "libc10", "libgomp", "_C")) else _OTHER


def _write_model(folder: Path) -> str:
    command = [sys.executable, "-m", f"{__spec__.parent.rpartition('.')[0]}.random_model", "--shape", "smol135"]
    subprocess.run([*command, "--out", str(folder / "model")], check=True, stdout=subprocess.DEVNULL)
    return str(folder / "model")


def _run_engine(
    model: str,
    quantization: str | None,
    num_threads: int,
    num_requests: int,
    num_prompt_tokens: int,
    temperature: float,
) -> None:
    """Run steps for as long as stdin says, once all requests generate, and print their mean processor time in ms."""
    config = EngineConfig(
        model=model,
        dtype="bfloat16",
        quantization=quantization,
        num_threads=num_threads,
        max_num_seqs=num_requests,
        max_model_len=2048,
        enable_prefix_caching=False,
    )
    core = build_engine(config, Path(model)).core
    for number in range(num_requests):
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=1024, ignore_eos=True)
        prompt = [5 + (number + place) % 200 for place in range(num_prompt_tokens)]
        core.add_request(EngineCoreRequest(request_id=str(number), prompt_token_ids=prompt, sampling_params=params))
    while _num_generating(core) < num_requests:
        core.step_fn()
    print(_READY, flush=True)
    give_up_at = time.monotonic() + float(sys.stdin.readline())
    began_s, num_steps = time.process_time(), 0
    while time.monotonic() < give_up_at and core.has_work:
        core.step_fn()
        num_steps += 1
    print(_DONE, 1e3 * (time.process_time() - began_s) / num_steps, flush=True)


def _num_generating(core: EngineCore) -> int:
    return sum(request.num_output_tokens > 0 for request in core.scheduler._running)


if __name__ == "__main__":
    main()
