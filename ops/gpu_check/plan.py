"""How much is measured: on a GPU, and where the command itself is tried out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of all parts.

    Args:
        device: "cuda" or "cpu".
        test_files: of ``tests/kernels``; a file is a process of its own.
        num_test_files_at_once: what takes their time is the compiler, on the host.
        kernels: what is timed.
        shapes: of ``worker/models/random_model.py``, in the order in which they are measured.
        batches: sizes whose decode steps are timed.
        decode_prompt_tokens, decode_tokens: of each of their requests.
        gap_batch, gap_tokens: requests that decode while the device is watched, and the tokens of each.
        prefill_tokens: of a prompt that is computed in one step.
        num_mixed: requests of the serving workload, their prompts and outputs drawn from the ranges.
        limits_s: of a part, by the first word of its name.
        total_s: of all parts together.
    """

    device: str
    is_quick: bool
    test_files: tuple[Path, ...]
    num_test_files_at_once: int
    kernels: tuple[str, ...]
    shapes: tuple[str, ...]
    batches: tuple[int, ...]
    decode_prompt_tokens: int
    decode_tokens: int
    gap_batch: int
    gap_tokens: int
    prefill_tokens: int
    num_prefills: int
    num_mixed: int
    mixed_prompt_tokens: tuple[int, int]
    mixed_output_tokens: tuple[int, int]
    max_model_len: int
    limits_s: dict[str, float]
    total_s: float


def full_plan(device: str) -> Plan:
    """What issue and README speak of; under 8 minutes on an H200 whatever hangs."""
    tests = sorted((ROOT / "tests" / "kernels").glob("test_gpu_*.py"))
    return Plan(
        device=device,
        is_quick=False,
        # Compiling for a GPU that is not there proves nothing more where one is.
        test_files=tuple(path for path in tests if path.name != "test_gpu_compiles.py"),
        num_test_files_at_once=max(1, len(os.sched_getaffinity(0)) // 2),
        kernels=_kernels_with_cases(),
        shapes=("qwen06", "qwen8b"),
        batches=(1, 16, 64, 256),
        decode_prompt_tokens=512,
        # The first of 256 prompts has some twenty tokens when the last has its first.
        decode_tokens=96,
        gap_batch=64,
        gap_tokens=48,
        prefill_tokens=8192,
        num_prefills=4,
        num_mixed=128,
        mixed_prompt_tokens=(64, 1024),
        mixed_output_tokens=(64, 256),
        max_model_len=16384,
        limits_s={"correctness": 120.0, "kernels": 150.0, "engine": 70.0, "transformers": 45.0},
        total_s=460.0,
    )


def quick_plan(device: str) -> Plan:
    """The same parts on next to nothing: tells that the command works, nothing about speed."""
    return Plan(
        device=device,
        is_quick=True,
        test_files=(ROOT / "tests" / "kernels" / "test_gpu_penalties.py",),
        num_test_files_at_once=1,
        kernels=("rms_norm",),
        shapes=("tiny",),
        batches=(1, 4),
        decode_prompt_tokens=16,
        decode_tokens=12,
        gap_batch=4,
        gap_tokens=8,
        prefill_tokens=64,
        num_prefills=2,
        num_mixed=4,
        mixed_prompt_tokens=(8, 32),
        mixed_output_tokens=(4, 8),
        max_model_len=256,
        limits_s={"correctness": 60.0, "kernels": 60.0, "engine": 60.0, "transformers": 60.0},
        total_s=300.0,
    )


def _kernels_with_cases() -> tuple[str, ...]:
    return tuple(sorted(path.parent.name for path in (ROOT / "kernels").glob("*/cases.py")))
