"""``python -m penstock.worker.engine.offline``: an engine alone on a workload file, without Redis or sockets.

The workload is ``{"requests": [{"prompt_token_ids": [...], "sampling_params": {...}}]}``; a request may also have an
``arrival_s``, the seconds after the start at which it enters, and a ``priority``. The output file holds what came out
and how fast. A workload may also be ``{"phases": [{"name": ..., "requests": [...], "concurrency": n}]}``, which run one
after the other on one engine; then the output file has a result for each.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from ....shared.errors import PenstockError
from ....shared.log import configure_logging
from ....shared.messages import EngineCoreRequest
from ....shared.params import SamplingParams
from ...config import (
    ATTENTION_BACKENDS,
    DEVICES,
    DTYPES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    QUANTIZATIONS,
    SCHEDULING_POLICIES,
    EngineConfig,
)
from ...models.folder import resolve_model_folder
from ..core import EngineCore
from ..garbage import freeze_loaded_objects
from .result import OfflineResult, PhasesResult, Record, rss_bytes

_INTEGER_OPTIONS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory")


class OfflineRequest(msgspec.Struct):
    """One request of a workload; ``sampling_params`` are the arguments of ``SamplingParams``."""

    prompt_token_ids: list[int]
    sampling_params: dict[str, Any]
    arrival_s: float = 0.0
    priority: int = 0


class Phase(msgspec.Struct):
    """A part of a workload with an end of its own.

    Args:
        concurrency: at most so many requests are in the engine (0: all).
        observes_device: tell for which share of the time the GPU computed, for which it is profiled.
    """

    name: str
    requests: list[OfflineRequest]
    concurrency: int = 0
    observes_device: bool = False


class Workload(msgspec.Struct):
    """The input file: either ``requests`` or ``phases``."""

    requests: list[OfflineRequest] = []
    phases: list[Phase] = []


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
    record = Record.of(len(requests))
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
            record.rss_queued_bytes = rss_bytes()
        if not core.has_work:
            time.sleep(requests[pending[-1]].arrival_s - now)
            continue
        outputs = core.step_fn()
        record.note(outputs, time.perf_counter() - start)
        step_stats = core.take_step_stats()
        if keeps_steps and step_stats is not None:
            record.steps.append(step_stats)
    return record.result(core.scheduler.stats(), time.perf_counter() - start, load_s)


def run_phases(core: EngineCore, phases: list[Phase], *, keeps_steps: bool = False) -> Iterator[PhasesResult]:
    """Run one phase after the other; yields the result so far after each.

    Raises: as ``run_workload``.
    """
    from ..execution.device_activity import DeviceActivity  # here, for torch

    process = psutil.Process()
    ready_s = time.time() - process.create_time()
    results: list[OfflineResult] = []
    for phase in phases:
        activity = DeviceActivity(is_wanted=phase.observes_device)
        with activity:
            result = run_workload(core, phase.requests, ready_s, concurrency=phase.concurrency, keeps_steps=keeps_steps)
        result = msgspec.structs.replace(result, name=phase.name, device_busy_share=activity.busy_share)
        results.append(result)
        now_bytes = rss_bytes()
        # The kernel counts the highest a little behind.
        peak_rss_bytes = max(now_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        yield PhasesResult(ready_s=ready_s, rss_bytes=now_bytes, peak_rss_bytes=peak_rss_bytes, phases=results)


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


def _parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="penstock.worker.engine.offline", description=__doc__)
    parser.add_argument("--model", required=True, help="model folder, or name on the hub")
    parser.add_argument("--workload", required=True, type=Path, help="JSON file with the requests")
    parser.add_argument("--output", required=True, type=Path, help="JSON file to write")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="auto")
    parser.add_argument(
        "--load-format", choices=LOAD_FORMATS, default="auto", help="dummy: random weights, drawn on the device"
    )
    parser.add_argument("--scheduling-policy", choices=SCHEDULING_POLICIES, default="fcfs")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 chooses")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="as that of worker start")
    parser.add_argument("--attention-backend", choices=ATTENTION_BACKENDS, default="auto", help="as there")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="as there")
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
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Load the model, run the workload, write the result; 1 and a sentence if something is wrong.

    Args:
        words: of the command line; None for those of this process.
    """
    started = time.perf_counter()
    arguments = _parse_arguments(words)
    configure_logging("warning")
    options = {name: getattr(arguments, name) for name in _INTEGER_OPTIONS if getattr(arguments, name) is not None}
    try:
        config = EngineConfig(
            model=arguments.model,
            device=arguments.device,
            dtype=arguments.dtype,
            load_format=arguments.load_format,
            scheduling_policy=arguments.scheduling_policy,
            num_threads=arguments.threads,
            deterministic=arguments.deterministic,
            quantization=arguments.quantization,
            enable_prefix_caching=arguments.enable_prefix_caching,
            async_scheduling=arguments.async_scheduling,
            enforce_eager=arguments.enforce_eager,
            attention_backend=arguments.attention_backend,
            kv_cache_dtype=arguments.kv_cache_dtype,
            **options,
        )
        workload = msgspec.json.decode(arguments.workload.read_bytes(), type=Workload)
        folder = resolve_model_folder(config.model, needs_weights=config.load_format != "dummy")
        # Here, not above: --help and a mistyped folder need no torch.
        from ..composition import build_engine

        core = build_engine(config, folder).core
        freeze_loaded_objects()
        if workload.phases:
            # Written after each phase: what is there stays if a later one fails.
            for result in run_phases(core, workload.phases, keeps_steps=arguments.steps):
                arguments.output.write_bytes(msgspec.json.encode(result))
        else:
            load_s = time.perf_counter() - started
            result = run_workload(core, workload.requests, load_s, keeps_steps=arguments.steps)
            arguments.output.write_bytes(msgspec.json.encode(result))
    except (PenstockError, OSError, msgspec.DecodeError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0
