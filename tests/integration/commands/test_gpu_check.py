"""`make gpu-check` on a CPU: as it is typed, and all its parts, on next to nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.ops.lab.gpu_check.__main__ import main
from penstock.ops.lab.gpu_check.goals import add_shares

ROOT = Path(__file__).parents[3]


def quick(output: Path, parts: str) -> list[str]:
    return ["--device", "cpu", "--quick", "--results", str(output), "--commit", "abc", "--only", parts]


def read(output: Path) -> dict[str, Any]:
    """Return the results of the parts, none of which failed."""
    lines = [json.loads(line) for line in output.read_text().splitlines() if line]
    for line in lines:
        assert (line["commit"], line["device"], line["missing"], line["is_quick"]) == ("abc", None, [], True)
        assert line["versions"]["torch"]
    parts = {line["part"]: line["result"] for line in lines if line["state"] == "ended"}
    assert {name: part["error"] for name, part in parts.items()} == dict.fromkeys(parts)
    return parts


@pytest.mark.slow
def test_the_command_runs_the_tests_of_kernels(tmp_path: Path) -> None:
    output = tmp_path / "gpu-check.jsonl"
    options = f"GPU_CHECK={' '.join(quick(output, 'correctness'))}"
    done = subprocess.run(
        ["make", "-s", "gpu-check", f"PYTHON={sys.executable}", options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parts = read(output)
    assert parts
    assert all(name.startswith("correctness") and part["passed"] > 0 for name, part in parts.items())
    assert "all parts have results" in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("warm_python")
def test_every_other_part_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "gpu-check.jsonl"
    status = main(quick(output, "kernels,engine,transformers,sleep,standby"))
    said = capsys.readouterr()
    assert status == 0, said
    names = (
        "engine tiny",
        "sleep tiny",
        "standby tiny",
        "transformers tiny",
        "engine tiny int8",
        "engine tiny tensor parallel 2",
    )
    parts = read(output)
    assert set(parts) == {"kernels", *names}
    add_shares(parts)
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
    # As many as are claimed at once.
    assert parts["standby tiny"]["num_recoveries"] > 0
    assert parts["standby tiny"]["standby_bytes"] > 0
    mixed = {parts[name]["mixed"]["output_tokens"] for name in ("engine tiny", "transformers tiny")}
    assert len(mixed) == 1
    assert "ms/step" in said.out
