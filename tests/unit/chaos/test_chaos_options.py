"""The engines that `penstock chaos` starts, and those of their requests that have one right answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.ops.lab.chaos.options import ChaosOptions
from penstock.ops.lab.chaos.several_models import choose_models, sharing_options


def chaos_options(**fields: Any) -> ChaosOptions:
    ways = {"num_requests": 1, "min_seconds": 0.0, "min_events": 0, "num_engines": 2, "concurrency": 1}
    return ChaosOptions(**{**ways, "interval_s": 1.0, "seed": 1, "json_path": "", "log_path": "", **fields})


@pytest.mark.parametrize(
    ("fields", "is_deterministic"),
    [
        ({}, True),
        ({"tensor_parallel_size": 2}, True),
        ({"pipeline_parallel_size": 2}, True),
        ({"engine": "vllm"}, False),
    ],
)
def test_engines_of_ours_have_one_right_answer(fields: dict[str, object], is_deterministic: bool) -> None:
    options = chaos_options(**fields)
    assert options.is_deterministic is is_deterministic
    assert ("--deterministic" in options.engine_arguments) is is_deterministic


def test_engines_on_a_gpu_share_the_first() -> None:
    assert chaos_options().device_arguments == ["--device", "cpu", "--threads", "1"]
    assert chaos_options(device="cuda").device_arguments == ["--gpus", "0", "--kv-cache-memory", "256MiB"]


def test_models_of_the_command_line_have_the_memory_that_it_names(tmp_path: Path) -> None:
    other = str(tmp_path / "other.gguf")
    options = chaos_options(num_models=2, models=["demo", other], device_memory="3GiB")
    paths = choose_models(tmp_path, options)
    assert [path.name for path in paths] == ["demo", "other.gguf"]
    words = sharing_options(options, paths)
    assert words[words.index("--device-memory") + 1] == "3GiB"
    assert words[-2:] == ["--model", other]
    assert "--kv-cache-memory" not in words
