"""``python -m penstock.worker.engine.offline``: an engine alone on a workload file, without Redis or sockets.

The workload is ``{"requests": [{"prompt_token_ids": [...], "sampling_params": {...}}]}``; a request may also have an
``arrival_s``, the seconds after the start at which it enters, and a ``priority``. The output file holds what came out
and how fast. A workload may also be ``{"phases": [{"name": ..., "requests": [...], "concurrency": n}]}``, which run one
after the other on one engine; then the output file has a result for each.
"""

from __future__ import annotations

import argparse
import math
import resource
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import psutil

from ...shared.errors import PenstockError
from ...shared.log import configure_logging
from ...shared.messages import EngineCoreOutput, EngineCoreRequest, SchedulerStats
from ...shared.params import SamplingParams
from ...shared.stats import StepStats
from ..config import DEVICES, DTYPES, QUANTIZATIONS, SCHEDULING_POLICIES, EngineConfig
from ..models.folder import resolve_model_folder
from .core import EngineCore
from .garbage import freeze_loaded_objects

_INTEGER_OPTIONS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory")


class OfflineRequest(msgspec.Struct):
    """One request of a workload; ``sampling_params`` are the arguments of ``SamplingParams``."""

    prompt_token_ids: list[int]
    sampling_params: dict[str, Any]
    arrival_s: float = 0.0
    priority: int = 0


class Phase(msgspec.Struct):
    """A part of a workload with an end of its own; at most ``concurrency`` requests are in the engine (0: all)."""

    name: str
    requests: list[OfflineRequest]
    concurrency: int = 0


class Workload(msgspec.Struct):
    """The input file: either ``requests`` or ``phases``."""

    requests: list[OfflineRequest] = []
    phases: list[Phase] = []


class OfflineResult(msgspec.Struct, kw_only=True):
    """The output file. TTFT counts from a request's arrival, or from when there was room for it. ITL is the time
    between two tokens of a request.

    Args:
        token_times_s: of each request, when its tokens came, and ``sent_s``, when it entered; since the start.
        rss_before_bytes, rss_queued_bytes: resident memory at the start, and once the first requests had entered.
        steps: what each step did, if that was asked for.
    """

    name: str = ""

    output_token_ids: list[list[int]]
    output_tokens: int
    wall_s: float
    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    load_s: float
    rss_bytes: int
    num_steps: int
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    token_times_s: list[list[float]]
    sent_s: list[float]
    rss_before_bytes: int
    rss_queued_bytes: int
    steps: list[StepStats] = []


class PhasesResult(msgspec.Struct, kw_only=True):
    """The output file of a workload of phases; ``ready_s`` is the time from the start of the process to its first."""

    ready_s: float
    rss_bytes: int
    peak_rss_bytes: int
    phases: list[OfflineResult]


@dataclass
class _Record:
    """What a run notes of its requests, by their index, and of its steps."""

    outputs: list[list[int]]
    token_times_s: list[list[float]]
    sent_s: list[float]
    rss_before_bytes: int
    rss_queued_bytes: int
    steps: list[StepStats] = field(default_factory=list)

    @classmethod
    def of(cls, num_requests: int) -> _Record:
        rss_bytes = _rss_bytes()
        requests = range(num_requests)
        return cls([[] for _ in requests], [[] for _ in requests], [0.0] * num_requests, rss_bytes, rss_bytes)

    def note(self, outputs: list[EngineCoreOutput], now_s: float) -> None:
        """Take in what a step gave out; raises ``PenstockError`` if that is a failure."""
        for output in outputs:
            if output.error is not None:
                raise PenstockError(f"request {output.request_id}: {output.error.message}")
            self.outputs[int(output.request_id)] += output.new_token_ids
            self.token_times_s[int(output.request_id)] += [now_s] * len(output.new_token_ids)

    def result(self, stats: SchedulerStats, wall_s: float, load_s: float) -> OfflineResult:
        """Reduce it to figures."""
        ttft_ms = [
            1e3 * (times[0] - sent) for times, sent in zip(self.token_times_s, self.sent_s, strict=True) if times
        ]
        itl_ms = [1e3 * (b - a) for times in self.token_times_s for a, b in pairwise(times)]
        num_tokens = sum(map(len, self.outputs))
        return OfflineResult(
            output_token_ids=self.outputs,
            output_tokens=num_tokens,
            wall_s=wall_s,
            output_tokens_per_s=num_tokens / wall_s,
            ttft_p50_ms=_percentile(ttft_ms, 0.5),
            ttft_p99_ms=_percentile(ttft_ms, 0.99),
            itl_p50_ms=_percentile(itl_ms, 0.5),
            itl_p99_ms=_percentile(itl_ms, 0.99),
            load_s=load_s,
            rss_bytes=_rss_bytes(),
            num_steps=stats.step_counter,
            num_preemptions=stats.num_preemptions,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
            token_times_s=self.token_times_s,
            sent_s=self.sent_s,
            rss_before_bytes=self.rss_before_bytes,
            rss_queued_bytes=self.rss_queued_bytes,
            steps=self.steps,
        )


def run_workload(
    core: EngineCore,
    requests: list[OfflineRequest],
    load_s: float,
    *,
    concurrency: int = 0,
    keeps_steps: bool = False,
) -> OfflineResult:
    """Run ``requests`` to their ends, each from its arrival on, at most ``concurrency`` at once (0: all).

    Raises:
        PenstockError: the engine refused or failed a request.
    """
    record = _Record.of(len(requests))
    room = concurrency or len(requests)
    # Taken from the end; those that arrive together enter in the file's order.
    pending = sorted(range(len(requests)), key=lambda index: (-requests[index].arrival_s, -index))
    start = time.perf_counter()
    while pending or core.has_work:
        now = time.perf_counter() - start
        while pending and requests[pending[-1]].arrival_s <= now and core.num_unfinished_requests < room:
            index = pending.pop()
            record.sent_s[index] = max(requests[index].arrival_s, now if concurrency else 0.0)
            _add(core, index, requests[index])
        if keeps_steps and not record.steps:
            record.rss_queued_bytes = _rss_bytes()
        if not core.has_work:
            time.sleep(requests[pending[-1]].arrival_s - now)
            continue
        outputs = core.step_fn()
        record.note(outputs, time.perf_counter() - start)
        step_stats = core.take_step_stats()
        if keeps_steps and step_stats is not None:
            record.steps.append(step_stats)
    return record.result(core.scheduler.stats(), time.perf_counter() - start, load_s)


def run_phases(core: EngineCore, phases: list[Phase], *, keeps_steps: bool = False) -> PhasesResult:
    """Run one phase after the other.

    Raises: as ``run_workload``.
    """
    process = psutil.Process()
    ready_s = time.time() - process.create_time()
    results = []
    for phase in phases:
        result = run_workload(core, phase.requests, ready_s, concurrency=phase.concurrency, keeps_steps=keeps_steps)
        results.append(msgspec.structs.replace(result, name=phase.name))
    rss_bytes = _rss_bytes()
    # The kernel counts the highest a little behind.
    peak_rss_bytes = max(rss_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return PhasesResult(ready_s=ready_s, rss_bytes=rss_bytes, peak_rss_bytes=peak_rss_bytes, phases=results)


def _add(core: EngineCore, index: int, request: OfflineRequest) -> None:
    params = SamplingParams(**request.sampling_params)
    refused = core.add_request(
        EngineCoreRequest(
            request_id=str(index),
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=params,
            priority=request.priority,
        )
    )
    if refused is not None and refused.error is not None:
        raise PenstockError(f"request {index}: {refused.error.message}")


def _rss_bytes() -> int:
    return psutil.Process().memory_info().rss


def _percentile(values: list[float], share: float) -> float:
    """The nearest-rank percentile; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="penstock.worker.engine.offline", description=__doc__)
    parser.add_argument("--model", required=True, help="model folder, or name on the hub")
    parser.add_argument("--workload", required=True, type=Path, help="JSON file with the requests")
    parser.add_argument("--output", required=True, type=Path, help="JSON file to write")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument("--scheduling-policy", choices=SCHEDULING_POLICIES, default="fcfs")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 chooses")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="as that of worker start")
    parser.add_argument("--deterministic", action="store_true", help="as that of worker start")
    parser.add_argument(
        "--no-enable-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        help="as that of worker start",
    )
    parser.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction, default=False, help="as there")
    parser.add_argument("--enforce-eager", action="store_true", help="as that of worker start")
    parser.add_argument("--steps", action="store_true", help="tell of each step what it did and how long it took")
    for name in _INTEGER_OPTIONS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    return parser.parse_args()


def main() -> int:
    """Load the model, run the workload, write the result; 1 and a sentence if something is wrong."""
    started = time.perf_counter()
    arguments = _parse_arguments()
    configure_logging("warning")
    options = {name: getattr(arguments, name) for name in _INTEGER_OPTIONS if getattr(arguments, name) is not None}
    try:
        config = EngineConfig(
            model=arguments.model,
            device=arguments.device,
            dtype=arguments.dtype,
            scheduling_policy=arguments.scheduling_policy,
            num_threads=arguments.threads,
            deterministic=arguments.deterministic,
            quantization=arguments.quantization,
            enable_prefix_caching=arguments.enable_prefix_caching,
            async_scheduling=arguments.async_scheduling,
            enforce_eager=arguments.enforce_eager,
            **options,
        )
        workload = msgspec.json.decode(arguments.workload.read_bytes(), type=Workload)
        folder = resolve_model_folder(config.model)
        # Here, not above: --help and a mistyped folder need no torch.
        from .composition import build_engine

        core = build_engine(config, folder).core
        freeze_loaded_objects()
        if workload.phases:
            result = run_phases(core, workload.phases, keeps_steps=arguments.steps)
        else:
            load_s = time.perf_counter() - started
            result = run_workload(core, workload.requests, load_s, keeps_steps=arguments.steps)
    except (PenstockError, OSError, msgspec.DecodeError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    arguments.output.write_bytes(msgspec.json.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
