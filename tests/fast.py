"""What `make test-fast` runs: all that needs neither torch nor an engine process, which cannot start without torch.

New files are in. One that needs torch finds it missing there, and belongs into the list below; a test that takes more
than a few seconds is marked slow, which leaves it out, too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parent
# Comes before the installed packages.
WITHOUT_TORCH = TESTS / "without_torch"

LEFT_OUT = (
    "e2e",
    "faults",
    "integration/commands/test_bench_sides.py",
    "integration/commands/test_gpu_check.py",
    "integration/engine",
    "integration/models",
    "integration/supervisor/test_fork_server.py",
    "integration/supervisor/test_worker_start.py",
    "kernels",
    "unit/engine/structured/test_drawn_schemas.py",
    "unit/engine/structured/test_known_schemas.py",
    "unit/engine/test_batch_queue.py",
    "unit/engine/test_cut.py",
    "unit/engine/test_filters.py",
    "unit/engine/test_input_batch.py",
    "unit/engine/test_logprobs.py",
    "unit/engine/test_num_threads.py",
    "unit/engine/test_packed_linear.py",
    "unit/engine/test_penalties.py",
    "unit/engine/test_prompt_rows.py",
    "unit/engine/test_sampler.py",
    "unit/engine/test_structured_grammar.py",
    "unit/engine/test_structured_schema.py",
    "unit/engine/test_structured_table.py",
    "unit/engine/test_thinking.py",
    "unit/engine/test_token_rules.py",
    "unit/engine/test_tool_grammars.py",
    "unit/test_gpu_check.py",
)


def is_left_out(path: Path) -> bool:
    """Whether a file or folder of tests is none of the fast ones."""
    return any(path.is_relative_to(TESTS / name) for name in LEFT_OUT)


def do_without_torch() -> None:
    """From now on an import of torch fails, in this process and in those it starts."""
    sys.path.insert(0, str(WITHOUT_TORCH))
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(WITHOUT_TORCH), *([others] if others else [])])
