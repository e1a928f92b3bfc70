"""`make gpu-check` as it is typed, on a CPU: all its parts, on next to nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_part_runs_without_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "gpu-check.json"
    options = f"GPU_CHECK=--device cpu --quick --json {output} --commit abc"
    done = subprocess.run(
        ["make", "-s", "gpu-check", f"PYTHON={sys.executable}", options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    assert (found["commit"], found["device"], found["missing"], found["is_quick"]) == ("abc", None, [], True)
    assert found["versions"]["torch"]
    parts = found["parts"]
    assert {name: part["error"] for name, part in parts.items()} == dict.fromkeys(
        (
            "correctness",
            "kernels",
            "engine tiny",
            "transformers tiny",
            "engine tiny int8",
            "engine tiny tensor parallel 2",
        )
    )
    assert parts["correctness"]["passed"] > 0
    assert parts["kernels"]["roofline"]["copy_gb_per_s"] > 0
    assert all(row["us"] > 0 for row in parts["kernels"]["rows"])
    for name, batches in (("engine tiny", [1, 4]), ("engine tiny int8", [4])):
        engine = parts[name]
        assert [row["batch"] for row in engine["decode"]] == batches
        assert all(row["ms_per_step"] > 0 and row["share_of_bandwidth"] > 0 for row in engine["decode"])
        assert engine["prefill"]["share_of_matmul"] > 0
    mixed = {parts[name]["mixed"]["output_tokens"] for name in ("engine tiny", "transformers tiny")}
    assert len(mixed) == 1
    assert {goal["state"] for goal in found["goals"]} == {"not measured"}
    assert "ms/step" in done.stdout
