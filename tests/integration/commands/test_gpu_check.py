"""`make gpu-check` on a CPU: as it is typed, and all its parts, on next to nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.ops.lab.gpu_check.__main__ import main

ROOT = Path(__file__).parents[3]


def quick(output: Path, parts: str) -> list[str]:
    return ["--device", "cpu", "--quick", "--json", str(output), "--commit", "abc", "--only", parts]


def read(output: Path, *names: str) -> dict[str, Any]:
    """The parts of these names, and no others, none of which failed."""
    found = json.loads(output.read_text())
    assert (found["commit"], found["device"], found["missing"], found["is_quick"]) == ("abc", None, [], True)
    assert found["versions"]["torch"]
    assert {name: part["error"] for name, part in found["parts"].items()} == dict.fromkeys(names)
    assert {goal["state"] for goal in found["goals"]} == {"not measured"}
    return found["parts"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_runs_the_tests_of_kernels(tmp_path: Path) -> None:
    output = tmp_path / "gpu-check.json"
    options = f"GPU_CHECK={' '.join(quick(output, 'correctness'))}"
    done = subprocess.run(
        ["make", "-s", "gpu-check", f"PYTHON={sys.executable}", options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert read(output, "correctness")["correctness"]["passed"] > 0
    assert f"written to {output}" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("warm_python")
def test_every_other_part_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "gpu-check.json"
    status = main(quick(output, "kernels,engine,transformers,sleep"))
    said = capsys.readouterr()
    assert status == 0, said
    names = ("engine tiny", "sleep tiny", "transformers tiny", "engine tiny int8", "engine tiny tensor parallel 2")
    parts = read(output, "kernels", *names)
    assert parts["kernels"]["roofline"]["copy_gb_per_s"] > 0
    assert all(row["us"] > 0 for row in parts["kernels"]["rows"])
    for name, batches in (("engine tiny", [1, 4]), ("engine tiny int8", [4])):
        engine = parts[name]
        assert [row["batch"] for row in engine["decode"]] == batches
        assert all(row["ms_per_step"] > 0 and row["share_of_bandwidth"] > 0 for row in engine["decode"])
        assert engine["prefill"]["share_of_matmul"] > 0
    for level in parts["sleep tiny"]["levels"]:
        assert level["is_same"]
        assert level["num_cycles"] == 2
        assert level["wake_s"] > 0
    mixed = {parts[name]["mixed"]["output_tokens"] for name in ("engine tiny", "transformers tiny")}
    assert len(mixed) == 1
    assert "ms/step" in said.out
