"""``python -m penstock.worker.engine.offline``: an engine alone on a workload file, without Redis or sockets.

The workload is ``{"requests": [{"prompt_token_ids": [...], "sampling_params": {...}}]}``; a request may also have an
``arrival_s``, the seconds after the start at which it enters, and a ``priority``. The output file holds what came out
and how fast. A workload may also be ``{"phases": [{"name": ..., "requests": [...], "concurrency": n}]}``, which run one
after the other on one engine; then the output file has a result for each.
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
from ....shared.params.adapters import adapter_digest
from ....shared.params.lora import LoRARequest
from ....shared.params.pooling import PoolingParams
from ....shared.params.sampling import SamplingParams
from ....shared.params.structured import StructuredOutputsParams
from ....shared.process.command_line import Parser, UsageError, run_reporting_errors
from ...config.engine_config import EngineConfig
from ...core.garbage import freeze_loaded_objects
from ...models.checkpoint.folder import resolve_model_folder
from ...options.display import effective_config
from ...options.settings import read_settings
from ...programs import OFFLINE, PROGRAMS, RunOptions
from ..core.engine_core import EngineCore
from .result import OfflineResult, PhasesResult, Record, rss_bytes


class OfflineRequest(msgspec.Struct):
    """One request of a workload; ``sampling_params`` are the arguments of ``SamplingParams``, or ``pooling_params``
    those of ``PoolingParams``. ``structured_outputs`` among them are the arguments of ``StructuredOutputsParams``.
    ``adapter`` is a folder as PEFT saves it."""

    prompt_token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    arrival_s: float = 0.0
    priority: int = 0
    pooling_params: dict[str, Any] | None = None
    adapter: str = ""


class Phase(msgspec.Struct):
    """A part of a workload with an end of its own.

    Args:
        concurrency: at most so many requests are in the engine (0: all).
        observes_device: tell for which share of the time the GPU computed, for which it is profiled.
        is_guessing: False to guess no tokens in this phase, though the engine was made to.
        is_fresh: begin without what the prefix cache has of the phases before.
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
    """Run ``requests`` to their ends, each from its arrival on, at most ``concurrency`` at once (0: all).

    Raises:
        PenstockError: the engine refused or failed a request.
    """
    record = Record.of(len(requests))
    room = concurrency or len(requests)
    # Taken from the end; those that arrive together enter in the file's order.
    pending = sorted(range(len(requests)), key=lambda index: (-requests[index].arrival_s, -index))
    before, cpu_before_s = core.scheduler.stats(), time.process_time()
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
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_before_s
    return record.result(core.scheduler.stats(), before, wall_s, load_s, cpu_s)


def run_phases(core: EngineCore, phases: list[Phase], *, keeps_steps: bool = False) -> Iterator[PhasesResult]:
    """Run one phase after the other; yields the result so far after each.

    Raises: as ``run_workload``.
    """
    from ..execution.device_activity import DeviceActivity  # here, for torch

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
        # The kernel counts the highest a little behind.
        peak_rss_bytes = max(now_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        yield PhasesResult(ready_s=ready_s, rss_bytes=now_bytes, peak_rss_bytes=peak_rss_bytes, phases=results)


def _add(core: EngineCore, index: int, request: OfflineRequest) -> None:
    pooling = None if request.pooling_params is None else PoolingParams(**request.pooling_params)
    refused = core.add_request(
        EngineCoreRequest(
            request_id=str(index),
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=_sampling_params(request.sampling_params) if pooling is None else None,
            pooling_params=pooling,
            priority=request.priority,
            lora_request=_adapter(request.adapter) if request.adapter else None,
        )
    )
    if refused is not None and refused.error is not None:
        raise PenstockError(f"request {index}: {refused.error.message}")


@functools.cache
def _adapter(folder: str) -> LoRARequest:
    """By its digest; its number says nothing here."""
    return LoRARequest(Path(folder).name, 1, folder, digest=adapter_digest(folder))


def _sampling_params(given: dict[str, Any]) -> SamplingParams:
    given = dict(given)
    if grammar := given.pop("structured_outputs", None):
        given["structured_outputs"] = StructuredOutputsParams(**grammar)
    return SamplingParams(**given)


def read_workload(path: Path) -> Workload:
    """Raises ``UsageError`` if the file cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Workload)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"the workload {path} cannot be read: {error}") from error


def _run(arguments: argparse.Namespace, started: float) -> int:
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
    # Here, not above: --help and a mistyped folder need no torch.
    from ..composition import build_engine

    engine = build_engine(config, folder)
    core = engine.core
    freeze_loaded_objects()
    if workload.phases:
        # Written after each phase: what is there stays if a later one fails.
        for result in run_phases(core, workload.phases, keeps_steps=options.steps):
            output.write_bytes(msgspec.json.encode(result))
    else:
        load_s = time.perf_counter() - started
        result = run_workload(core, workload.requests, load_s, keeps_steps=options.steps)
        output.write_bytes(msgspec.json.encode(result))
    engine.close()
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Load the model, run the workload, write the result; 1 or 2 and a sentence if something is wrong.

    Args:
        words: of the command line; None for those of this process.
    """
    started = time.perf_counter()
    parser = Parser(prog="penstock.worker.engine.offline", description=__doc__)
    OFFLINE.add_arguments(parser)
    arguments = parser.parse_args(words)
    return run_reporting_errors(lambda: _run(arguments, started))
