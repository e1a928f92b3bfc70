"""``python -m penstock.worker.engine.offline``: an engine on a workload file, without Redis or sockets.

The workload is ``{"requests": [{"prompt_token_ids": [...], "sampling_params": {...}}]}``; a request may also have an
``arrival_s``, the seconds after the start at which it enters, and a ``priority``. The output file has the output tokens
and the measured speed. A workload may also be ``{"phases": [{"name": ..., "requests": [...], "concurrency": n}]}``. The
phases run one after the other on one engine, and the output file has a result for each.
"""

from __future__ import annotations

import argparse
import functools
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from ....shared.errors import PenstockError
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.lora import LoRARequest, adapter_digest
from ....shared.params.pooling import PoolingParams
from ....shared.params.sampling import SamplingParams
from ....shared.params.structured import StructuredOutputsParams
from ....shared.process.command_line import Parser, UsageError, run_reporting_errors
from ...config.engine_config import EngineConfig
from ...core.garbage import freeze_loaded_objects
from ...models.checkpoint.folder import resolve_model_folder
from ...options.settings import effective_config, read_settings
from ...programs import OFFLINE, PROGRAMS, RunOptions
from ..core.engine_core import EngineCore
from .result import OfflineResult, PhasesResult, Record, rss_bytes


class OfflineRequest(msgspec.Struct):
    """A request of a workload.

    Args:
        sampling_params: arguments of ``SamplingParams``; in it ``structured_outputs`` are the arguments of
            ``StructuredOutputsParams``.
        pooling_params: arguments of ``PoolingParams``; None for a request that generates.
        adapter: a folder as saved by PEFT; empty for none.
    """

    prompt_token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    arrival_s: float = 0.0
    priority: int = 0
    pooling_params: dict[str, Any] | None = None
    adapter: str = ""


class Phase(msgspec.Struct):
    """A part of a workload that runs to its end before the next part begins.

    Args:
        concurrency: maximum number of requests in the engine; 0 without a limit.
        observes_device: whether to profile the GPU and report its busy share.
        is_guessing: whether to draft tokens in this phase, if the engine is configured to.
        is_fresh: whether to clear the prefix cache first.
    """

    name: str
    requests: list[OfflineRequest]
    concurrency: int = 0
    observes_device: bool = False
    is_guessing: bool = True
    is_fresh: bool = False


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
    """Run ``requests`` until all have finished, each from its arrival on.

    At most ``concurrency`` requests are in the engine at the same time; 0 without a limit.

    Raises:
        PenstockError: the engine refused or failed a request.
    """
    record = Record.of(len(requests))
    max_requests = concurrency or len(requests)
    # Popped from the end. Requests that arrive together enter in the order of the file.
    pending = sorted(range(len(requests)), key=lambda index: (-requests[index].arrival_s, -index))
    before, cpu_before_s = core.scheduler.stats(), time.process_time()
    start = time.perf_counter()
    while pending or core.has_work:
        now = time.perf_counter() - start
        while pending and requests[pending[-1]].arrival_s <= now and core.num_unfinished_requests < max_requests:
            index = pending.pop()
            record.sent_s[index] = max(requests[index].arrival_s, now if concurrency else 0.0)
            _add_request(core, index, requests[index])
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
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_before_s
    return record.result(core.scheduler.stats(), before, wall_s, load_s, cpu_s)


def run_phases(core: EngineCore, phases: list[Phase], *, keeps_steps: bool = False) -> Iterator[PhasesResult]:
    """Run one phase after the other, and yield the result so far after each.

    Raises:
        PenstockError: as ``run_workload``.
    """
    from ..execution.device_activity import DeviceActivity  # imported here because it imports torch

    process = psutil.Process()
    ready_s = time.time() - process.create_time()
    results: list[OfflineResult] = []
    for phase in phases:
        core.scheduler.set_drafting(phase.is_guessing)
        if phase.is_fresh:
            core.forget_blocks()
        activity = DeviceActivity(is_enabled=phase.observes_device)
        with activity:
            result = run_workload(core, phase.requests, ready_s, concurrency=phase.concurrency, keeps_steps=keeps_steps)
        result = msgspec.structs.replace(result, name=phase.name, device_busy_share=activity.busy_share)
        results.append(result)
        now_bytes = rss_bytes()
        # The kernel updates its peak with a delay, so it may be less than the current value.
        peak_rss_bytes = max(now_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        yield PhasesResult(ready_s=ready_s, rss_bytes=now_bytes, peak_rss_bytes=peak_rss_bytes, phases=results)


def _add_request(core: EngineCore, index: int, request: OfflineRequest) -> None:
    pooling = None if request.pooling_params is None else PoolingParams(**request.pooling_params)
    refused = core.add_request(
        EngineCoreRequest(
            request_id=str(index),
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=_sampling_params(request.sampling_params) if pooling is None else None,
            pooling_params=pooling,
            priority=request.priority,
            lora_request=_lora_request(request.adapter) if request.adapter else None,
        )
    )
    if refused is not None and refused.error is not None:
        raise PenstockError(f"request {index}: {refused.error.message}")


@functools.cache
def _lora_request(folder: str) -> LoRARequest:
    """Return the adapter in ``folder``. The engine identifies it by its digest, so its number is arbitrary."""
    return LoRARequest(Path(folder).name, 1, folder, digest=adapter_digest(folder))


def _sampling_params(arguments: dict[str, Any]) -> SamplingParams:
    arguments = dict(arguments)
    if grammar := arguments.pop("structured_outputs", None):
        arguments["structured_outputs"] = StructuredOutputsParams(**grammar)
    return SamplingParams(**arguments)


def read_workload(path: Path) -> Workload:
    """Read a workload file.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Workload)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"the workload {path} cannot be read: {error}") from error


def _run_offline(arguments: argparse.Namespace, started: float) -> int:
    settings = read_settings(OFFLINE, PROGRAMS, arguments, os.environ)
    if arguments.show_config:
        sys.stdout.write(effective_config(settings))
        return 0
    settings.require()
    options = settings.make(RunOptions)
    with settings.naming_sources():
        config = settings.make(EngineConfig)
    workload, output = read_workload(Path(options.workload)), Path(options.output)
    folder = resolve_model_folder(config.model, needs_weights=config.needs_weights)
    # Not at the top, because --help and a mistyped folder need no torch.
    from ..composition import build_engine

    engine = build_engine(config, folder)
    core = engine.core
    freeze_loaded_objects()
    load_s = time.perf_counter() - started
    # There are no pauses, in which a served engine does it.
    while core.prepare_more():
        continue
    if workload.phases:
        # Written after each phase, so that earlier results remain if a later phase fails.
        for result in run_phases(core, workload.phases, keeps_steps=options.steps):
            output.write_bytes(msgspec.json.encode(result))
    else:
        result = run_workload(core, workload.requests, load_s, keeps_steps=options.steps)
        output.write_bytes(msgspec.json.encode(result))
    engine.close()
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Load the model, run the workload and write the result.

    Return the exit status: 0, or 1 or 2 after an error message.

    Args:
        words: arguments of the command line; None for those of this process.
    """
    started = time.perf_counter()
    parser = Parser(prog="penstock.worker.engine.offline", description=__doc__)
    OFFLINE.add_arguments(parser)
    arguments = parser.parse_args(words)
    return run_reporting_errors(lambda: _run_offline(arguments, started))
