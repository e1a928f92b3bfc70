"""Cost of more requests in the engine: time of scheduler and step, memory of a waiting and of a running request.

The engine core runs alone in its own process, and reports the times of the parts of each step. Only steps count in
which exactly the given number of requests ran and none had prompt tokens left.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import msgspec

from .....shared.errors import ConfigurationError
from .....shared.stats import StepStats
from ..workload import Phase, make_workload, write_workload
from .judge import read_vocab_size

NUM_RUNNING = (1, 8, 64, 512)
NUM_QUEUED = 2000
# Short prompts and long answers, or the first would have ended before the last has begun.
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 96


class Size(msgspec.Struct, kw_only=True):
    """Medians over the steps with a number of running requests. The scheduler's time is all but the model's."""

    num_running: int
    num_steps: int
    scheduler_us_per_request: float
    step_ms: float


class GrowthRow(msgspec.Struct, kw_only=True):
    """All sizes; ``kib_per_queued`` with ``num_queued`` waiting in the engine, ``kib_per_running`` with all running,
    its keys and values of ``tokens_per_running`` tokens included."""

    model: str
    sizes: list[Size]
    num_queued: int
    kib_per_queued: float
    kib_per_running: float
    tokens_per_running: int


class _PhaseSteps(msgspec.Struct):
    name: str
    steps: list[StepStats]
    rss_before_bytes: int
    rss_queued_bytes: int
    rss_bytes: int


class _Told(msgspec.Struct):
    phases: list[_PhaseSteps]


def measure_growth(
    name: str,
    model: Path,
    engine_options: list[str],
    scratch: Path,
    seed: int = 0,
    *,
    sizes: tuple[int, ...] = NUM_RUNNING,
    num_queued: int = NUM_QUEUED,
) -> GrowthRow:
    """Run batches of ``sizes`` requests, then many more than fit into one.

    Raises:
        ConfigurationError: the engine failed; the message has its words.
    """

    def batch(count: int, num_output_tokens: int) -> Phase:
        prompt_tokens, output_tokens = (PROMPT_TOKENS, PROMPT_TOKENS), (num_output_tokens, num_output_tokens)
        vocab_size = read_vocab_size(model)
        items = make_workload(count, vocab_size, seed, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        return Phase(str(count), items, count)

    command = ["--model", str(model), "--max-num-seqs", str(max(sizes)), *engine_options]
    by_name = {
        phase.name: phase for phase in _run_offline(command, scratch, [batch(size, OUTPUT_TOKENS) for size in sizes])
    }
    # In another process: this one has memory to spare by now, which would pass for none taken.
    (queued,) = _run_offline(command, scratch, [batch(num_queued, 1)])
    largest = by_name[str(max(sizes))]
    return GrowthRow(
        model=name,
        sizes=[_size(num_running, by_name[str(num_running)].steps) for num_running in sizes],
        num_queued=num_queued,
        kib_per_queued=(queued.rss_queued_bytes - queued.rss_before_bytes) / num_queued / 1024,
        kib_per_running=(largest.rss_bytes - largest.rss_before_bytes) / max(sizes) / 1024,
        tokens_per_running=PROMPT_TOKENS + OUTPUT_TOKENS,
    )


def _run_offline(options: list[str], scratch: Path, phases: list[Phase]) -> list[_PhaseSteps]:
    workload, output = scratch / "growth.json", scratch / "growth-output.json"
    write_workload(phases, workload)
    command = [sys.executable, "-m", "penstock.worker.engine.offline", "--steps", *options]
    command += ["--workload", str(workload), "--output", str(output)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode != 0:
        raise ConfigurationError(f"the engine alone failed: {completed.stderr.strip()}")
    return msgspec.json.decode(output.read_bytes(), type=_Told).phases


def _size(num_running: int, steps: list[StepStats]) -> Size:
    full = [step for step in steps if step.num_reqs == num_running and not step.num_prefill_tokens]
    scheduler_us = [1e6 * (step.schedule_time_s + step.update_time_s) / num_running for step in full]
    return Size(
        num_running=num_running,
        num_steps=len(full),
        scheduler_us_per_request=statistics.median(scheduler_us),
        step_ms=statistics.median(1000 * step.step_time_s for step in full),
    )
