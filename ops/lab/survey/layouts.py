"""``python -m penstock.ops.lab.survey.layouts``: families of models over two ranks, in each way that ranks share them.

Every cell is the result of ``python -m penstock.ops.lab.survey`` for the type: the mode of computation if all tokens
are those of transformers alone, mixed, chunked and preempted, else a note with the reason.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import transformers

from . import trial
from .child import Attempt, first_line, try_in_child, try_model_type
from .grouped import compare_grouped
from .kept import KeptOutcomes
from .outcome import Outcome
from .small_config import small_config

_FAMILIES = (
    "llama",
    "qwen3",
    "gemma3_text",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v3",
)
_ARCHITECTURE = re.compile(r"\b\w+For(CausalLM|ConditionalGeneration)\b")
_BEGIN, _END = "<!-- families over two ranks -->", "<!-- end of the families -->"


def try_grouped(model_type: str, folder: Path) -> Outcome:
    """Try ``model_type`` in two engines of a data-parallel group, in the empty ``folder``."""
    outcome = Outcome(model_type=model_type)
    try:
        config = small_config(model_type)
        expectation = trial.find_model(config, folder)
        outcome.mode = trial.load(folder).forward.mode
        outcome.told = compare_grouped(folder, expectation)
    except Exception as error:  # whatever an architecture's own code raises
        outcome.reason = first_line(error)
    return outcome


LAYOUTS: dict[str, Attempt] = {
    "tp 2": partial(try_model_type, options={"tensor_parallel_size": 2}),
    "pp 2": partial(try_model_type, options={"pipeline_parallel_size": 2}),
    "ep 2": partial(try_model_type, options={"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    "dp 2": try_grouped,
}


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line, or ``words``; try the types without a stored outcome, and write or print the table."""
    parser = argparse.ArgumentParser(prog="penstock.ops.lab.survey.layouts", description=__doc__)
    parser.add_argument("--only", default=",".join(_FAMILIES), metavar="TYPE,TYPE", help="these model types")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), metavar="WAY,WAY", help="these ways, such as 'tp 2'")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="keep each outcome there, and go on behind them")
    parser.add_argument("--into", type=Path, metavar="FILE", help="a page with places that say where the table is")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for one model type in one way")
    arguments = parser.parse_args(words)
    kept, families, layouts = KeptOutcomes(arguments.rows, {}), arguments.only.split(","), arguments.layouts.split(",")
    for model_type in families:
        for layout in layouts:
            name = f"{model_type} {layout}"
            if name not in kept.found:
                outcome = try_in_child(model_type, arguments.timeout_s, LAYOUTS[layout])
                sys.stderr.write(f"{name}: {outcome.mode} {outcome.told} {outcome.reason}\n")
                outcome.model_type = name
                kept.add(outcome)
        if arguments.into:
            _write_into(arguments.into, table(kept, families, layouts))
    if not arguments.into:
        sys.stdout.write(table(kept, families, layouts))
    return 0


def table(kept: KeptOutcomes, families: Sequence[str], layouts: Sequence[str]) -> str:
    """Return rows of the ``families`` tried so far, and notes on differences."""
    notes: list[str] = []
    rows = []
    for family in families:
        outcomes = [kept.found.get(f"{family} {layout}") for layout in layouts]
        rows.append(f"| {family} | {' | '.join(_cell(outcome, notes) for outcome in outcomes)} |")
    return "\n".join(
        [
            f"| model type | {' | '.join(layouts)} |",
            "|---" * (len(layouts) + 1) + "|",
            *rows,
            "",
            *(_wrapped(f"{number}. {note}") for number, note in enumerate(notes, 1)),
            "",
            f"Made with transformers {transformers.__version__}, torch {torch.__version__} and Python "
            f"{platform.python_version()}, on a CPU.",
            "",
        ]
    )


def _cell(outcome: Outcome | None, notes: list[str]) -> str:
    if outcome is None:
        return "not tried"
    if outcome.is_identical:
        return f"same ({outcome.mode})"
    note = outcome.reason or ", ".join(f"{way}: {said}" for way, said in outcome.told.items())
    # Alike for all whom it concerns.
    note = _ARCHITECTURE.sub("the architecture", note.removeprefix("not loaded: "))
    if note not in notes:
        notes.append(note)
    return f"no [{notes.index(note) + 1}]"


def _wrapped(note: str) -> str:
    return textwrap.fill(note, 120, subsequent_indent="   ", break_long_words=False, break_on_hyphens=False)


def _write_into(path: Path, markdown: str) -> None:
    before, _, rest = path.read_text().partition(_BEGIN)
    _, _, behind = rest.partition(_END)
    path.write_text(f"{before}{_BEGIN}\n\n{markdown}\n{_END}{behind}")


if __name__ == "__main__":
    sys.exit(main())
