"""``python -m penstock.ops.lab.gpu_check [--json FILE] [--only correctness,kernels,...] [--device cpu --quick]``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from .correctness import check_correctness, check_engine
from .engine import PartFailedError, lack_gpus, measure_engine, measure_rival, measure_sleep, measure_variant
from .goals import add_shares, find_goals
from .kernel_times import time_kernels
from .plan import ROOT, Plan, full_plan, quick_plan
from .probe import NEEDED, TESTS_NEED
from .program import run_program
from .report import goal_lines, lines_of
from .workload import SEED

_PROBE_LIMIT_S = 60.0
# Required packages of each kind of part.
_NEEDS = {
    "correctness": {"torch", "triton", "transformers", "pytest"},
    "engine-tests": {*NEEDED, *TESTS_NEED},
    "kernels": {"torch", "triton"},
    "engine": {*NEEDED},
    "sleep": {*NEEDED},
    "transformers": {"torch", "transformers", "tokenizers", "psutil"},
}
Part = Callable[[Path, float], dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts, print and write their results. Return 1 if a part failed or no device exists."""
    options = _parse(arguments)
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-check-") as folder:
        scratch = Path(folder)
        about = _about(scratch, options.commit)
        if about is None:
            return 1
        if options.device == "cuda" and about["device"] is None:
            why = "torch is missing" if "torch" in about["missing"] else "torch sees no GPU"
            sys.stderr.write(f"{why} here; --device cpu --quick tries this command out without a GPU\n")
            return 1
        plan = quick_plan(options.device) if options.quick else full_plan(options.device)
        print("  ".join(f"{key} {value}" for key, value in about.items()))
        if about["missing"]:
            print(f"missing here, so what needs it is not measured: {', '.join(about['missing'])}")
        parts = _parts_by_worth(plan, tuple(options.engine_options.split()), about["num_devices"])
        chosen = {name: part for name, part in parts.items() if name.split()[0] in options.only}
        return run_parts(plan, chosen, about, scratch, options.json)


def run_parts(plan: Plan, parts: dict[str, Part], about: dict[str, Any], scratch: Path, output: Path) -> int:
    """Run ``parts`` in turn; ``output`` is written after each. Return 1 if one failed."""
    deadline = time.monotonic() + plan.total_s
    results: dict[str, Any] = {**about, "seed": SEED, "is_quick": plan.is_quick, "parts": {}, "goals": []}
    for name, part in parts.items():
        kind = name.split()[0]
        missing = sorted(_NEEDS[kind] & set(about["missing"]))
        limit_s = min(plan.limits_s[kind], deadline - time.monotonic())
        results["parts"][name] = _run_part(part, missing, scratch, limit_s)
        add_shares(results["parts"])
        goals = find_goals(results["parts"], plan.kernels, plan.shapes)
        # Small sizes, or another device, meet nothing.
        results["goals"] = [(replace(goal, value=None) if plan.is_quick else goal).as_json() for goal in goals]
        output.write_text(json.dumps(results, indent=1) + "\n")
        print("\n".join(lines_of(name, results["parts"][name])), flush=True)
    print("goals")
    print("\n".join(goal_lines(results["goals"])))
    print(f"written to {output}")
    return int(any(part["error"] for part in results["parts"].values()))


def _parts_by_worth(plan: Plan, engine_options: tuple[str, ...], num_gpus: int) -> dict[str, Part]:
    """In the order of their worth: if time runs out, the last go without."""
    parts: dict[str, Part] = {"correctness": partial(check_correctness, plan)}
    if plan.device != "cpu":  # where all of them would be skipped
        parts["engine-tests"] = partial(check_engine, plan)
    parts["kernels"] = partial(time_kernels, plan)
    parts |= {f"engine {shape}": partial(measure_engine, shape, engine_options, plan) for shape in plan.shapes}
    parts[f"sleep {plan.shapes[-1]}"] = partial(measure_sleep, plan.shapes[-1], plan)
    parts |= {f"transformers {shape}": partial(measure_rival, shape, plan) for shape in plan.shapes}
    for variant in plan.variants:
        measure = partial(measure_variant, variant, engine_options, plan)
        can_run = plan.device == "cpu" or variant.num_gpus <= num_gpus
        parts[f"engine {variant.shape} {variant.name}"] = measure if can_run else partial(lack_gpus, variant)
    return parts


def _run_part(part: Part, missing: list[str], scratch: Path, limit_s: float) -> dict[str, Any]:
    if missing:
        return {"error": f"missing here: {', '.join(missing)}", "seconds": 0.0}
    if limit_s < 1:
        return {"error": "not begun: no time was left", "seconds": 0.0}
    started = time.monotonic()
    try:
        result = part(scratch, limit_s)
    except PartFailedError as error:
        result = {"error": str(error)}
    except Exception as error:  # a mistake in reading one part's result must not cost the other parts
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    return {**result, "seconds": round(time.monotonic() - started, 1)}


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
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="where the JSON goes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the command out")
    parser.add_argument("--only", default=",".join(_NEEDS), metavar="KINDS", help=f"of: {', '.join(_NEEDS)}")
    parser.add_argument(
        "--engine-options", default="", metavar="OPTIONS", help="more of the offline engine's: --async-scheduling, ..."
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
