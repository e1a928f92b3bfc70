"""Lists of the tests that run without torch, and of those that are quick enough to be run all the time.

New files are among both. One that needs torch finds it missing there, and belongs into the first list below. A file
that takes its time, since real servers and processes wait for each other in it, belongs into the second; one slow test
in a file of quick ones is marked slow instead.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis

TESTS = Path(__file__).parent
# Comes before the installed packages.
WITHOUT_TORCH = TESTS / "without_torch"

# Of the examples that a property is tested with.
FAST_EXAMPLES = 10

NEED_TORCH = (
    "e2e",
    "engines/test_vllm_lora.py",
    "engines/test_vllm_pooling.py",
    "faults",
    "integration/checkpoints",
    "integration/commands/test_bench_sides.py",
    "integration/commands/test_gpu_check.py",
    "integration/engine",
    "integration/fleet",
    "integration/groups/test_serving_groups.py",
    "integration/http_engine/test_worker.py",
    "integration/keeper/test_cards.py",
    "integration/models",
    "integration/supervisor/test_fork_server.py",
    "integration/supervisor/test_load_timeout.py",
    "integration/supervisor/test_worker_start.py",
    "kernels",
    "real_model",
    "unit/bench/test_decoder_step.py",
    "unit/bench/test_step_shares.py",
    "unit/options/test_model_paths.py",
    "unit/engine/structured/test_drawn_schemas.py",
    "unit/engine/structured/test_known_schemas.py",
    "unit/engine/structured/test_native_calls.py",
    "unit/engine/structured/test_number_length.py",
    "unit/engine/scheduling/test_batch_queue.py",
    "unit/engine/ranks/test_staged_batches.py",
    "unit/engine/test_layouts.py",
    "unit/models/test_moving.py",
    "unit/models/test_kernel_choice.py",
    "unit/engine/ranks/test_partition.py",
    "unit/engine/images/test_encoder_pieces.py",
    "unit/engine/sampling/test_axes.py",
    "unit/engine/sampling/test_filters.py",
    "unit/engine/test_gate.py",
    "unit/engine/ranks/test_rank_team.py",
    "unit/engine/ranks/test_rank_hosts.py",
    "unit/engine/images/test_image_decode.py",
    "unit/engine/scheduling/test_input_batch.py",
    "unit/engine/sampling/test_logprobs.py",
    "unit/engine/test_num_threads.py",
    "unit/engine/test_processor.py",
    "unit/engine/ranks/test_rank_exchange.py",
    "unit/engine/ranks/test_rank_steps.py",
    "unit/engine/kv_cache/test_window_groups.py",
    "unit/engine/offload/test_offload_scheduling.py",
    "unit/engine/test_packed_linear.py",
    "unit/engine/sampling/test_penalties.py",
    "unit/engine/sampling/test_prompt_rows.py",
    "unit/engine/sampling/test_sampler.py",
    "unit/engine/speculation/test_several_tokens.py",
    "unit/engine/speculation/test_speculation.py",
    "unit/engine/structured/test_structured_grammar.py",
    "unit/engine/structured/test_structured_schema.py",
    "unit/engine/structured/test_structured_table.py",
    "unit/engine/speculation/test_suffix_drafts.py",
    "unit/engine/structured/test_thinking.py",
    "unit/engine/sampling/test_token_rules.py",
    "unit/engine/structured/test_tool_grammars.py",
    "unit/engine/structured/test_tool_inputs.py",
    "unit/models/test_listening.py",
    "unit/test_gpu_check.py",
)


SLOW = (
    "integration/batches",
    "integration/broker/claims/test_fairness.py",
    "integration/broker/damage/test_shared_damage.py",
    "integration/client",
    "integration/commands",
    "integration/embedded",
    "integration/groups/test_serving_groups.py",
    "integration/jobs",
    "integration/shards",
    "integration/sim/test_simulation.py",
    "integration/sim/test_swaps.py",
    "integration/supervisor",
    "integration/top",
    "unit/deploy/test_kubernetes.py",
    "unit/deploy/test_systemd.py",
)


def is_among(path: Path, names: tuple[str, ...]) -> bool:
    """Whether a file or folder of tests is one of ``names``, or lies in one."""
    return any(path.is_relative_to(TESTS / name) for name in names)


def be_quick() -> None:
    """Test properties with few examples, so that all are tested."""
    hypothesis.settings.register_profile("fast", hypothesis.settings(), max_examples=FAST_EXAMPLES)
    hypothesis.settings.load_profile("fast")


def do_without_torch() -> None:
    """From now on an import of torch fails, in this process and in those it starts."""
    sys.path.insert(0, str(WITHOUT_TORCH))
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(WITHOUT_TORCH), *([others] if others else [])])
