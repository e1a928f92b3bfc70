"""``python -m penstock.ops.lab.gpu_check [--plan] [--results FILE] [--only kernels,...] [--device cpu --quick]``.

A call takes nine minutes at most and appends its results to a file. The next call continues with the other parts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from .choice import parts_within
from .correctness import check_correctness, check_engine
from .engine import (
    PartFailedError,
    lack_gpus,
    measure_engine,
    measure_field,
    measure_rival,
    measure_sleep,
    measure_standby,
    measure_variant,
)
from .goals import add_shares, find_goals
from .kernel_times import time_kernels
from .plan import ROOT, Plan, full_plan, kind_of, quick_plan
from .probe import NEEDED, TESTS_NEED
from .program import run_program
from .report import goal_lines, lines_of
from .results_file import ResultsFile
from .workload import SEED

_PROBE_LIMIT_S = 60.0
_PLANNED_MINUTES = (10, 20, 30)
# Files of tests in a part.
_FILES_PER_GROUP = 6
# Required packages of each kind of part.
_NEEDS = {
    "correctness": {"torch", "triton", "transformers", "pytest"},
    "engine-tests": {*NEEDED, *TESTS_NEED},
    "kernels": {"torch", "triton"},
    "engine": {*NEEDED},
    "field": {*NEEDED},
    "sleep": {*NEEDED},
    "standby": {*NEEDED},
    "transformers": {"torch", "transformers", "tokenizers", "psutil"},
}
_NEEDED_HERE = f"Needed are an NVIDIA GPU and a Python with {', '.join(sorted(set[str]().union(*_NEEDS.values())))}"
Part = Callable[[Path, float], dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts of this call, print and append their results. Return 1 if a part failed or no device exists."""
    options = _parse(arguments)
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-check-") as folder:
        scratch = Path(folder)
        about = _about(scratch, options.commit)
        if about is None:
            return 1
        plan = quick_plan(options.device) if options.quick else full_plan(options.device)
        if options.minutes is not None:
            plan = replace(plan, call_s=60 * options.minutes)
        parts = _parts_by_worth(plan, tuple(options.engine_options.split()), about["num_devices"])
        chosen = {name: part for name, part in parts.items() if kind_of(name) in options.only}
        results = ResultsFile(options.results, {**about, "seed": SEED, "is_quick": plan.is_quick})
        if options.plan:
            print("\n".join(plan_lines(list(chosen), plan, results)))
            return 0
        if options.device == "cuda" and about["device"] is None:
            why = "torch is missing" if "torch" in about["missing"] else "torch sees no GPU"
            sys.stderr.write(f"{why} here. {_NEEDED_HERE}; --device cpu --quick tries this command out without a GPU\n")
            return 1
        print("  ".join(f"{key} {value}" for key, value in about.items()))
        if about["missing"]:
            print(f"missing here, so what needs it is not measured: {', '.join(about['missing'])}")
        return run_parts(plan, chosen, about["missing"], scratch, results)


def run_parts(
    plan: Plan,
    parts: dict[str, Part],
    missing: list[str],
    scratch: Path,
    results: ResultsFile,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run the parts without a result that fit into ``plan.call_s``, the next ones first. Return 1 if one failed."""
    deadline = clock() + plan.call_s
    has_failed = False
    while following := next(parts_within(list(parts), plan, results, deadline - clock()), None):
        name, limit_s = following
        results.begin(name)
        lacking = sorted(_NEEDS[kind_of(name)] & set(missing))
        result = _run_part(parts[name], lacking, scratch, limit_s, clock)
        results.end(name, result)
        has_failed = has_failed or bool(result["error"])
        add_shares(whole := results.results())
        print("\n".join(lines_of(name, whole[name])), flush=True)
    add_shares(whole := results.results())
    goals = find_goals(whole, plan.kernels, plan.shapes)
    print("goals")
    # Small sizes, or another device, meet nothing.
    print("\n".join(goal_lines([(replace(goal, value=None) if plan.is_quick else goal).as_json() for goal in goals])))
    left = [name for name in parts if name not in whole]
    print(f"{len(left)} parts are left for the next call: {', '.join(left)}" if left else "all parts have results")
    return int(has_failed)


def plan_lines(parts: list[str], plan: Plan, results: ResultsFile) -> Iterator[str]:
    """Yield the parts of the next 10, 20 and 30 minutes, in order, with the longest time of each."""
    for minutes in _PLANNED_MINUTES:
        chosen = list(parts_within(parts, plan, results, 60.0 * minutes))
        total_s = sum(seconds for _, seconds in chosen)
        yield f"next {minutes} minutes: {len(chosen)} parts, {total_s:.0f} s at most"
        yield from (f"  {seconds:4.0f} s  {name}" for name, seconds in chosen)


def _parts_by_worth(plan: Plan, engine_options: tuple[str, ...], num_gpus: int) -> dict[str, Part]:
    """In the order of their worth: if time runs out, the last go without."""
    files = plan.test_files
    groups = [files[begin : begin + _FILES_PER_GROUP] for begin in range(0, len(files), _FILES_PER_GROUP)]
    parts: dict[str, Part] = {
        f"correctness {number} of {len(groups)}": partial(check_correctness, replace(plan, test_files=group))
        for number, group in enumerate(groups, start=1)
    }
    if plan.device != "cpu":  # where all of them would be skipped
        parts["engine-tests"] = partial(check_engine, plan)
    parts |= {f"engine {shape}": partial(measure_engine, shape, engine_options, plan) for shape in plan.shapes}
    parts |= {f"field {work.name}": partial(measure_field, work, engine_options, plan) for work in plan.field_workloads}
    parts["kernels"] = partial(time_kernels, plan)
    parts[f"sleep {plan.shapes[-1]}"] = partial(measure_sleep, plan.shapes[-1], plan)
    parts[f"standby {plan.shapes[0]}"] = partial(measure_standby, plan.shapes[0], plan)
    parts |= {f"transformers {shape}": partial(measure_rival, shape, plan) for shape in plan.shapes}
    for variant in plan.variants:
        measure = partial(measure_variant, variant, engine_options, plan)
        can_run = plan.device == "cpu" or variant.num_gpus <= num_gpus
        parts[f"engine {variant.shape} {variant.name}"] = measure if can_run else partial(lack_gpus, variant)
    return parts


def _run_part(
    part: Part, missing: list[str], scratch: Path, limit_s: float, clock: Callable[[], float]
) -> dict[str, Any]:
    if missing:
        return {"error": f"missing here: {', '.join(missing)}", "seconds": 0.0}
    started = clock()
    try:
        result = part(scratch, limit_s)
    except PartFailedError as error:
        result = {"error": str(error)}
    except Exception as error:  # a mistake in reading one part's result must not cost the other parts
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    return {**result, "seconds": round(clock() - started, 1)}


def _about(scratch: Path, commit: str | None) -> dict[str, Any] | None:
    log = scratch / "probe.log"
    ended = run_program([sys.executable, "-m", "penstock.ops.lab.gpu_check.probe"], log, _PROBE_LIMIT_S)
    if not ended.is_well:
        sys.stderr.write(f"this Python cannot be asked what it has: {ended.error}\n")
        return None
    return {**json.loads(ended.words.splitlines()[-1]), "commit": commit or _commit()}


def _commit() -> str | None:
    """Return the commit of the source tree, with "+" if files differ; None outside of a git tree."""
    outputs: list[str] = []
    for command in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            completed = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        outputs.append(completed.stdout.strip())
    return outputs[0] + ("+" if outputs[1] else "")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("penstock.ops.lab.gpu_check", description="Measure all there is on a GPU.")
    parser.add_argument("--results", type=Path, default=Path("gpu-check.jsonl"), help="file to which results go")
    parser.add_argument("--plan", action="store_true", help="only say what the next 10, 20 and 30 minutes would bring")
    parser.add_argument("--minutes", type=float, metavar="M", help="time limit of this call (default 8.7)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the command out")
    parser.add_argument("--only", default=",".join(_NEEDS), metavar="KINDS", help=f"of: {', '.join(_NEEDS)}")
    parser.add_argument(
        "--engine-options", default="", metavar="OPTIONS", help="more of the offline engine's: --deterministic, ..."
    )
    parser.add_argument("--commit", help="to be noted, where the source tree has no git")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    unknown = sorted(set(options.only) - set(_NEEDS))
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(_NEEDS)}")
    if options.device == "cpu" and not options.quick:
        parser.error("--device cpu needs --quick: the full sizes take hours without a GPU")
    return options


if __name__ == "__main__":
    sys.exit(main())
