"""``python -m penstock.worker.engine.offline``: an engine alone on a workload file, without Redis or sockets.

The workload is ``{"requests": [{"prompt_token_ids": [...], "sampling_params": {...}}]}``; a request may also have an
``arrival_s``, the seconds after the start at which it enters, and a ``priority``. The output file holds what came out
and how fast.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import psutil

from ...shared.errors import PenstockError
from ...shared.log import configure_logging
from ...shared.messages import EngineCoreRequest
from ...shared.params import SamplingParams
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


class Workload(msgspec.Struct):
    """The input file."""

    requests: list[OfflineRequest]


class OfflineResult(msgspec.Struct, kw_only=True):
    """The output file. TTFT counts from a request's arrival; ITL is the time between two tokens of a request."""

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


def run_workload(core: EngineCore, requests: list[OfflineRequest], load_s: float) -> OfflineResult:
    """Run ``requests`` to their ends, each from its arrival on.

    Raises:
        PenstockError: the engine refused or failed a request.
    """
    outputs: list[list[int]] = [[] for _ in requests]
    token_times_s: list[list[float]] = [[] for _ in requests]
    # Taken from the end; those that arrive together enter in the file's order.
    pending = sorted(range(len(requests)), key=lambda index: (-requests[index].arrival_s, -index))
    start = time.perf_counter()
    while pending or core.has_work:
        now = time.perf_counter() - start
        while pending and requests[pending[-1]].arrival_s <= now:
            index = pending.pop()
            _add(core, index, requests[index])
        if not core.has_work:
            time.sleep(requests[pending[-1]].arrival_s - now)
            continue
        step_outputs = core.step_fn()
        now = time.perf_counter() - start
        for output in step_outputs:
            if output.error is not None:
                raise PenstockError(f"request {output.request_id}: {output.error.message}")
            outputs[int(output.request_id)] += output.new_token_ids
            token_times_s[int(output.request_id)] += [now] * len(output.new_token_ids)
    wall_s = time.perf_counter() - start
    ttft_ms = [1e3 * (times[0] - r.arrival_s) for times, r in zip(token_times_s, requests, strict=True) if times]
    itl_ms = [1e3 * (b - a) for times in token_times_s for a, b in pairwise(times)]
    num_tokens = sum(map(len, outputs))
    stats = core.scheduler.stats()
    return OfflineResult(
        output_token_ids=outputs,
        output_tokens=num_tokens,
        wall_s=wall_s,
        output_tokens_per_s=num_tokens / wall_s,
        ttft_p50_ms=_percentile(ttft_ms, 0.5),
        ttft_p99_ms=_percentile(ttft_ms, 0.99),
        itl_p50_ms=_percentile(itl_ms, 0.5),
        itl_p99_ms=_percentile(itl_ms, 0.99),
        load_s=load_s,
        rss_bytes=psutil.Process().memory_info().rss,
        num_steps=stats.step_counter,
        num_preemptions=stats.num_preemptions,
        prefix_cache_queries=stats.prefix_cache_queries,
        prefix_cache_hits=stats.prefix_cache_hits,
    )


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
            **options,
        )
        workload = msgspec.json.decode(arguments.workload.read_bytes(), type=Workload)
        folder = resolve_model_folder(config.model)
        # Here, not above: --help and a mistyped folder need no torch.
        from .composition import build_engine

        core = build_engine(config, folder).core
        freeze_loaded_objects()
        result = run_workload(core, workload.requests, load_s=time.perf_counter() - started)
    except (PenstockError, OSError, msgspec.DecodeError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    arguments.output.write_bytes(msgspec.json.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
