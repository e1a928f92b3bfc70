"""Parts 3 and 4: the engine on models of random weights, and transformers' continuous batching on the same work."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from .figures import decode_figures, prefill_figures, serving_figures, sleep_figures, standby_figures
from .plan import ROOT, FieldWorkload, Plan, Variant
from .program import Ended, run_program
from .shape import Shape
from .workload import (
    GAP,
    MIXED,
    PREFILL,
    decode_phase_name,
    field_phase_name,
    write_engine_workload,
    write_field_workload,
    write_rival_workload,
)

# An event of ``ops/guide/reference/logs.md``.
_CHOSEN = "kernels_chosen"
# One request of the longest length, and some.
_STANDBY_CACHE_BYTES = {"cuda": 8 << 30, "cpu": 1 << 26}
_RIVAL = ROOT / "ops" / "lab" / "bench" / "peers" / "transformers_continuous.py"


class PartFailedError(Exception):
    """A part has no results; the message has the reason."""


def measure_engine(shape: str, options: tuple[str, ...], plan: Plan, scratch: Path, limit_s: float) -> dict[str, Any]:
    """Measure decoding at each batch size, prefill of a long prompt, and mixed serving, as far as time permits.

    ``options`` are further options of the offline engine.

    Raises:
        PartFailedError: no phase ended in time.
    """
    return measure_variant(Variant("", shape, ()), options, plan, scratch, limit_s)


def measure_variant(
    variant: Variant, options: tuple[str, ...], plan: Plan, scratch: Path, limit_s: float
) -> dict[str, Any]:
    """Run ``measure_engine`` with a variant, on the work for variants.

    Raises: as ``measure_engine``.
    """
    started = time.monotonic()
    if variant.name:
        plan = plan.for_variants()
    shape, options = variant.shape, (*options, *variant.options)
    folder = _model_folder(shape, plan, scratch, limit_s)
    model = replace(Shape.read(folder), weight_bytes=variant.weight_bytes, cached_bytes=variant.cached_bytes)
    workload, output = scratch / f"engine-{shape}.json", scratch / f"engine-{shape}.out.json"
    write_engine_workload(plan, model.vocab_size, workload)
    ended = _run_engine(folder, options, plan, workload, output, limit_s - (time.monotonic() - started))
    figures = _engine_figures(_phases(output, ended), plan, model)
    for row in figures["decode"]:
        # Of the bandwidth of all of them.
        row["bytes_per_step"] /= variant.num_gpus
    chosen = kernels_chosen(output.with_suffix(".log"))
    return {"error": ended.error or None, "options": options, "kernels_chosen": chosen, **figures}


def measure_field(
    work: FieldWorkload, options: tuple[str, ...], plan: Plan, scratch: Path, limit_s: float
) -> dict[str, Any]:
    """Measure tokens/s and times between tokens at each concurrency of ``work``, as far as time permits.

    Raises: as ``measure_engine``.
    """
    started = time.monotonic()
    folder = _model_folder(work.shape, plan, scratch, limit_s)
    workload, output = scratch / "field.json", scratch / "field.out.json"
    write_field_workload(work, Shape.read(folder).vocab_size, workload)
    ended = _run_engine(folder, options, plan, workload, output, limit_s - (time.monotonic() - started))
    phases = _phases(output, ended)
    rows = [
        {
            "concurrency": concurrency,
            "published": work.published_tokens_per_s.get(concurrency),
            **serving_figures(phases[field_phase_name(concurrency)]),
        }
        for concurrency in work.concurrencies
        if field_phase_name(concurrency) in phases
    ]
    return {"error": ended.error or None, "options": options, "field": rows}


def _run_engine(
    folder: Path, options: tuple[str, ...], plan: Plan, workload: Path, output: Path, limit_s: float
) -> Ended:
    """Run the offline engine on ``workload``."""
    command = [sys.executable, "-m", "penstock.worker.engine.offline", "--model", str(folder), "--steps"]
    command += ["--load-format", "dummy", "--dtype", "bfloat16", "--device", plan.device]
    command += ["--no-enable-prefix-caching", "--max-model-len", str(plan.max_model_len)]
    command += ["--max-num-seqs", str(plan.max_num_seqs)]
    command += ["--max-num-batched-tokens", str(max(plan.prefill_tokens, plan.max_num_seqs))]
    if plan.device == "cpu":  # a cache of the needed size instead of the host's memory
        command += ["--kv-cache-memory", str(1 << 26)]
    command += [*options, "--workload", str(workload), "--output", str(output)]
    output.unlink(missing_ok=True)
    return run_program(command, output.with_suffix(".log"), limit_s)


def measure_sleep(shape: str, plan: Plan, scratch: Path, limit_s: float) -> dict[str, Any]:
    """Put an engine to sleep and wake it, many times at each level.

    Raises:
        PartFailedError: no level ended in time.
    """
    result, ended = _run_times("sleep", ["--cycles", str(plan.num_sleeps)], shape, plan, scratch, limit_s)
    levels = [sleep_figures(level) for level in result["levels"]]
    return {"error": ended.error or None, "levels": levels}


def measure_standby(shape: str, plan: Plan, scratch: Path, limit_s: float) -> dict[str, Any]:
    """Kill an engine with a standby, and measure the time to the next token and the memory of the standby.

    Raises:
        PartFailedError: it did not end in time.
    """
    options = ["--kills", str(plan.num_kills), "--kv-cache-memory", str(_STANDBY_CACHE_BYTES[plan.device])]
    result, ended = _run_times("standby", options, shape, plan, scratch, limit_s)
    return {"error": ended.error or None, **standby_figures(result)}


def _run_times(
    name: str, options: list[str], shape: str, plan: Plan, scratch: Path, limit_s: float
) -> tuple[dict[str, Any], Ended]:
    """Run the program ``{name}_times`` on a model of a shape; return its results, and how it ended.

    Raises:
        PartFailedError: it wrote nothing in time.
    """
    started = time.monotonic()
    folder, output = _model_folder(shape, plan, scratch, limit_s), scratch / f"{name}-{shape}.out.json"
    command = [sys.executable, "-m", f"penstock.ops.lab.gpu_check.{name}_times", "--model", str(folder)]
    command += ["--device", plan.device, "--max-model-len", str(plan.max_model_len), *options, "--output", str(output)]
    output.unlink(missing_ok=True)
    ended = run_program(command, output.with_suffix(".log"), limit_s - (time.monotonic() - started))
    if not output.exists():
        raise PartFailedError(ended.error or "it wrote no result")
    return json.loads(output.read_text()), ended


def lack_gpus(variant: Variant, scratch: Path, limit_s: float) -> dict[str, Any]:
    """Return the result of a variant that needs more GPUs than exist."""
    return {"error": None, "needs": f"needs {variant.num_gpus} GPUs"}


def measure_rival(shape: str, plan: Plan, scratch: Path, limit_s: float) -> dict[str, Any]:
    """transformers' continuous batching, as it configures itself on a GPU, on the mixed work.

    Raises:
        PartFailedError: it did not end it.
    """
    started = time.monotonic()
    folder = _model_folder(shape, plan, scratch, limit_s)
    workload, output = scratch / f"rival-{shape}.json", scratch / f"rival-{shape}.out.json"
    write_rival_workload(plan, Shape.read(folder).vocab_size, workload)
    command = [sys.executable, str(_RIVAL), "--model", str(folder), "--load-format", "dummy", "--dtype", "bfloat16"]
    command += ["--device", plan.device, "--workload", str(workload), "--output", str(output)]
    ended = run_program(command, output.with_suffix(".log"), limit_s - (time.monotonic() - started))
    phases = _phases(output, ended)
    return {"error": ended.error or None, "mixed": serving_figures(phases[MIXED])}


def kernels_chosen(log: Path) -> list[str]:
    """Return what the engine's log says of the kernels that it chose by its own times, a line for each part."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return [line.partition(_CHOSEN)[2].strip() for line in lines if _CHOSEN in line]


def _engine_figures(phases: dict[str, Any], plan: Plan, model: Shape) -> dict[str, Any]:
    decode: list[dict[str, Any]] = []
    for batch in plan.batches:
        phase = phases.get(decode_phase_name(batch))
        if phase is None:
            continue
        figures = decode_figures(phase, plan.decode_prompt_tokens)
        figures["bytes_per_step"] = model.decode_bytes(batch, figures["context_tokens"])
        decode.append(figures)
    prefill = None
    if PREFILL in phases:
        prefill = prefill_figures(phases[PREFILL], plan.prefill_tokens)
        prefill["flop"] = model.prefill_flop(plan.prefill_tokens)
    mixed = serving_figures(phases[MIXED]) if MIXED in phases else None
    busy_share = phases[GAP]["device_busy_share"] if GAP in phases else None
    idle_share = None if busy_share is None else 1 - busy_share
    return {"decode": decode, "prefill": prefill, "mixed": mixed, "device_idle_share": idle_share}


def _model_folder(shape: str, plan: Plan, scratch: Path, limit_s: float) -> Path:
    """Write ``config.json`` and a tokenizer once per shape, and return the folder. Engines draw the weights."""
    folder = scratch / shape
    if not (folder / "tokenizer.json").exists():
        command = [sys.executable, "-m", "penstock.ops.lab.random_model", "--shape", shape, "--out", str(folder)]
        command += ["--no-weights", "--max-model-len", str(plan.max_model_len)]
        folder.mkdir(exist_ok=True)
        ended = run_program(command, scratch / f"{shape}.log", limit_s)
        if not ended.is_well:
            raise PartFailedError(ended.error)
    return folder


def _phases(output: Path, ended: Ended) -> dict[str, Any]:
    if not output.exists():
        raise PartFailedError(ended.error or "it wrote no result")
    return {phase["name"]: phase for phase in json.loads(output.read_text())["phases"]}
