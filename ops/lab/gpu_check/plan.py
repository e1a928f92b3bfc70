"""How much is measured: on a GPU, and where the command itself is tried out."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# First words of the names of parts.
KINDS = ("correctness", "engine-tests", "kernels", "engine", "field", "sleep", "standby", "transformers")


@dataclass(frozen=True)
class Variant:
    """The engine with an option, to measure its gain or cost against the engine without it.

    Args:
        shape: one of ``Plan.shapes``.
        options: options of the offline engine.
        weight_bytes, cached_bytes: bytes of a number in a linear layer, and in a key or value.
        num_gpus: required GPUs; on a CPU ranks are processes.
    """

    name: str
    shape: str
    options: tuple[str, ...]
    weight_bytes: int = 2
    cached_bytes: float = 2
    num_gpus: int = 1


@dataclass(frozen=True)
class FieldWorkload:
    """A workload that other engines publish figures of: requests of one length, at several concurrencies.

    Args:
        shape: one of ``Plan.shapes``.
        published_tokens_per_s: output tokens/s by concurrency, where a figure is known.
    """

    shape: str
    prompt_tokens: int
    output_tokens: int
    concurrencies: tuple[int, ...]
    published_tokens_per_s: dict[int, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.shape} {self.prompt_tokens}-{self.output_tokens}"


# vLLM 0.30 on an H100 in bfloat16: perf_points of tgarg01/silybench-data.
_PUBLISHED_8B = {1: 146.0, 64: 6597.0, 256: 13567.0}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of all parts.

    Args:
        device: "cuda" or "cpu".
        test_files: files of ``tests/kernels/gpu``; each runs in its own process.
        engine_tests: files with tests of the engine, of which some are marked ``gpu``.
        num_test_files_at_once: concurrent test files; most of their time is compilation on the host.
        kernels: kernels to time.
        shapes: shapes of ``ops/lab/random_model.py``, in the order of measurement.
        batches: batch sizes whose decode steps are timed.
        max_num_seqs: option of the engine.
        variants: options to measure, each on its shape.
        variant_batches: as ``batches``, for variants; apart from these only prefill is measured.
        decode_prompt_tokens, decode_tokens: lengths of their requests.
        gap_batch, gap_tokens: requests that decode while the device is profiled, and the tokens of each.
        prefill_tokens: length of a prompt that is computed in one step.
        num_kills: kills of an engine with a standby, of the first shape.
        num_sleeps: cycles of sleep at each level, of the last shape.
        num_mixed: requests of the serving workload, with random prompts and outputs from the ranges.
        field_workloads: workloads with published figures.
        limits_s: time limits of parts, by the first word of their names.
        call_s: time limit of a call, which runs some of the parts.
    """

    device: str
    is_quick: bool
    test_files: tuple[Path, ...]
    engine_tests: tuple[Path, ...]
    num_test_files_at_once: int
    kernels: tuple[str, ...]
    shapes: tuple[str, ...]
    batches: tuple[int, ...]
    max_num_seqs: int
    variants: tuple[Variant, ...]
    variant_batches: tuple[int, ...]
    decode_prompt_tokens: int
    decode_tokens: int
    gap_batch: int
    gap_tokens: int
    prefill_tokens: int
    num_prefills: int
    num_sleeps: int
    num_kills: int
    num_mixed: int
    mixed_prompt_tokens: tuple[int, int]
    mixed_output_tokens: tuple[int, int]
    max_model_len: int
    field_workloads: tuple[FieldWorkload, ...]
    limits_s: dict[str, float]
    call_s: float

    def for_variants(self) -> Plan:
        """Return the plan for variants: without serving and profiling."""
        return replace(self, batches=self.variant_batches, num_mixed=0, gap_batch=0)


def full_plan(device: str) -> Plan:
    """Return the full plan. A call of it takes less than nine minutes, even if parts hang."""
    tests = sorted((ROOT / "tests" / "kernels" / "gpu").glob("test_gpu_*.py"))
    return Plan(
        device=device,
        is_quick=False,
        # Compiling for a GPU that is not there proves nothing more where one is.
        test_files=tuple(path for path in tests if path.name != "test_gpu_compiles.py"),
        engine_tests=_files_with_marks(),
        num_test_files_at_once=max(1, len(os.sched_getaffinity(0)) // 2),
        kernels=_kernels_with_cases(),
        shapes=("qwen06", "qwen8b"),
        batches=(1, 16, 64, 256),
        max_num_seqs=256,
        # Determinism where launches cost most; bytes where weights and caches take the time.
        variants=(
            Variant("deterministic", "qwen06", ("--deterministic",)),
            Variant("no look-ahead", "qwen06", ("--no-async-scheduling",)),
            Variant("fp8 cache", "qwen8b", ("--kv-cache-dtype", "fp8"), cached_bytes=1),
            # With a scale in bfloat16 for each 32.
            Variant("int8 cache", "qwen8b", ("--kv-cache-dtype", "int8"), cached_bytes=1 + 2 / 32),
            Variant("int8", "qwen8b", ("--quantization", "int8"), weight_bytes=1),
            Variant("fp8", "qwen8b", ("--quantization", "fp8"), weight_bytes=1),
            Variant("tensor parallel 2", "qwen8b", ("--tensor-parallel-size", "2"), num_gpus=2),
            Variant("pipeline parallel 2", "qwen8b", ("--pipeline-parallel-size", "2"), num_gpus=2),
        ),
        variant_batches=(1, 64),
        decode_prompt_tokens=512,
        # The first of 256 prompts has some twenty tokens when the last has its first.
        decode_tokens=96,
        gap_batch=64,
        gap_tokens=48,
        prefill_tokens=8192,
        num_prefills=4,
        num_sleeps=20,
        num_kills=3,
        num_mixed=128,
        mixed_prompt_tokens=(64, 1024),
        mixed_output_tokens=(64, 256),
        max_model_len=16384,
        field_workloads=(
            FieldWorkload("qwen8b", 128, 1024, (1, 64, 256), _PUBLISHED_8B),
            FieldWorkload("qwen8b", 2048, 2048, (1, 64, 256)),
            FieldWorkload("qwen06", 128, 1024, (1, 64, 256)),
            FieldWorkload("qwen06", 2048, 2048, (1, 64, 256)),
        ),
        limits_s={"correctness": 150.0, "engine-tests": 120.0, "kernels": 150.0, "engine": 70.0, "transformers": 45.0}
        | {"sleep": 90.0, "standby": 150.0, "field": 270.0},
        call_s=520.0,
    )


def quick_plan(device: str) -> Plan:
    """Return the same parts with minimal sizes, to test the command, not speed."""
    return Plan(
        device=device,
        is_quick=True,
        test_files=(ROOT / "tests" / "kernels" / "gpu" / "test_gpu_penalties.py",),
        engine_tests=(),
        num_test_files_at_once=1,
        kernels=("rms_norm",),
        shapes=("tiny",),
        batches=(1, 4),
        max_num_seqs=4,
        variants=(
            Variant("int8", "tiny", ("--quantization", "int8"), weight_bytes=1),
            Variant("tensor parallel 2", "tiny", ("--tensor-parallel-size", "2"), num_gpus=2),
        ),
        variant_batches=(4,),
        decode_prompt_tokens=16,
        decode_tokens=12,
        gap_batch=4,
        gap_tokens=8,
        prefill_tokens=64,
        num_prefills=2,
        num_sleeps=2,
        num_kills=1,
        num_mixed=4,
        mixed_prompt_tokens=(8, 32),
        mixed_output_tokens=(4, 8),
        max_model_len=256,
        # Whatever else the machine is doing.
        field_workloads=(FieldWorkload("tiny", 8, 12, (1, 4), {1: 1.0}),),
        limits_s=dict.fromkeys(KINDS, 240.0),
        call_s=2400.0,
    )


def kind_of(part: str) -> str:
    """Return the kind of a part: the first word of its name."""
    return part.split()[0]


def _files_with_marks() -> tuple[Path, ...]:
    """Return the files with GPU tests of parts of the engine; those of kernels are run separately."""
    folders = (ROOT / "tests" / "integration", ROOT / "tests" / "unit" / "engine")
    files = sorted(path for folder in folders for path in folder.rglob("test_*.py"))
    return tuple(path for path in files if _has_mark(path) or _has_mark(path.with_name("conftest.py")))


def _has_mark(path: Path) -> bool:
    return path.exists() and "mark.gpu" in path.read_text()


def _kernels_with_cases() -> tuple[str, ...]:
    cases = (ROOT / "ops" / "lab" / "kernels" / "cases").glob("*.py")
    return tuple(sorted(path.stem for path in cases if path.stem != "__init__"))
