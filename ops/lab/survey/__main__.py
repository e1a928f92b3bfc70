"""``python -m penstock.ops.lab.survey``: tries every model type of transformers, and writes the tables.

The types are causal language models, and models that read images.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .child import Attempt, try_in_child, try_model_type
from .images.models import SEEING
from .images.trial import try_vision_model
from .kept import KeptOutcomes
from .model_types import NOT_TEXT_DECODERS, causal_lm_types
from .outcome import Outcome
from .table import describe_options, page


def main() -> int:
    """Parse the command line, try the types one by one, write the page; 1 if one was asked for that does not exist."""
    arguments = _parse_arguments()
    options = _rank_options(arguments)
    text_types = causal_lm_types()
    selected = arguments.only.split(",") if arguments.only else text_types
    of_images = [name for name in SEEING if not arguments.only or name in selected]
    selected = [name for name in selected if name in text_types or name not in SEEING]
    unknown = sorted(set(selected) - set(text_types))
    if unknown:
        sys.stderr.write(f"transformers has no causal language model of type {', '.join(unknown)}\n")
        return 1
    skipped = {name: NOT_TEXT_DECODERS[name] for name in selected if name in NOT_TEXT_DECODERS}
    kept = KeptOutcomes(arguments.rows, options)
    tried = [name for name in selected if name not in skipped]

    def write(seeing: Sequence[Outcome] = ()) -> None:
        if arguments.out:
            outcomes = [kept.found[name] for name in tried if name in kept.found]
            of_all = page(outcomes, skipped, describe_options(options), seeing, num_untried=len(tried) - len(outcomes))
            arguments.out.write_text(of_all)

    for name in tried:
        if name not in kept.found:
            kept.add(_try(name, arguments.timeout_s, partial(try_model_type, options=options)))
            write()
    # Over ranks they are tried by tests/integration/models/ranks/test_ranks.py.
    write([] if options else [_try(name, arguments.timeout_s, try_vision_model) for name in of_images])
    num_identical = sum(kept.found[name].is_identical for name in tried)
    sys.stderr.write(f"{num_identical} of {len(tried)} give the tokens of transformers\n")
    return 0


def _try(name: str, timeout_s: float, attempt: Attempt) -> Outcome:
    start = time.monotonic()
    outcome = try_in_child(name, timeout_s, attempt)
    _print_outcome(outcome, time.monotonic() - start)
    return outcome


def _print_outcome(outcome: Outcome, took_s: float) -> None:
    results = ", ".join(f"{way} {result}" for way, result in outcome.told.items())
    results += ": " if results and outcome.reason else ""
    sys.stderr.write(f"{outcome.model_type} ({took_s:.0f} s): {outcome.mode} {results}{outcome.reason}\n")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="penstock.ops.lab.survey", description=__doc__)
    parser.add_argument("--only", default="", metavar="TYPE,TYPE", help="these model types instead of all")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="keep each outcome there at once, and do not try again what it has"
    )
    parser.add_argument("--timeout-s", type=float, default=120.0, help="for one model type")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="ranks that share each layer")
    parser.add_argument("--pipeline-parallel", type=int, default=1, metavar="N", help="stages of layers")
    parser.add_argument("--expert-parallel", action="store_true", help="ranks have whole experts")
    return parser.parse_args()


def _rank_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of ``EngineConfig`` that are not at their defaults."""
    fields = {
        "tensor_parallel_size": arguments.tensor_parallel,
        "pipeline_parallel_size": arguments.pipeline_parallel,
        "enable_expert_parallel": arguments.expert_parallel,
    }
    return {name: value for name, value in fields.items() if value not in (1, False)}


if __name__ == "__main__":
    sys.exit(main())
