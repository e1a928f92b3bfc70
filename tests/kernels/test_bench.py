"""The benchmark of the kernels: no time for a wrong result, and one failure does not cost the other rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels import native
from penstock.ops.lab.kernels import __main__ as command
from penstock.ops.lab.kernels.__main__ import find_kernels, main
from penstock.ops.lab.kernels.cases import Case, Setting
from penstock.ops.lab.kernels.cases import paged_attention as paged_attention_cases
from penstock.ops.lab.kernels.cases import rms_norm as rms_norm_cases
from penstock.ops.lab.kernels.report import as_text
from penstock.ops.lab.kernels.roofline import Roofline
from penstock.ops.lab.kernels.row import Row, measure_case

from ..native_library import native_as_before

CPU = torch.device("cpu")
BUDGET_S = 1e-4
ROOFLINE = Roofline(copy_gb_per_s=100.0, matmul_tflop_per_s=1.0)


@pytest.fixture(autouse=True)
def _native_as_before() -> Iterator[None]:
    """The command loads the compiled kernels for good, as a program may."""
    with native_as_before():
        yield


def doubled(inputs: Tensor) -> Tensor:
    return inputs + inputs


def doubled_in_place(inputs: Tensor) -> Tensor:
    return inputs.mul_(2)


def wrong(inputs: Tensor) -> Tensor:
    return inputs * 2.1


def broken(_: Tensor) -> Tensor:
    raise RuntimeError("no kernel image\nand more")


def case(**changes: object) -> Case:
    inputs = torch.arange(6.0).reshape(2, 3)
    plain: dict[str, object] = {"shape": "T=2", "dtype": inputs.dtype, "inputs": (inputs,), "num_bytes": 48}
    return Case(**(plain | {"run": doubled, "truth": doubled} | changes))  # pyright: ignore[reportArgumentType]


def test_prompts_are_compared_with_the_libraries() -> None:
    cases = paged_attention_cases.cases(Setting(CPU, is_quick=True))
    prompt = next(each for each in cases if each.shape.startswith("prefill"))
    row = measure_case("paged_attention", prompt, CPU, BUDGET_S)
    assert row.rivals_us is not None
    assert row.rivals_us.keys() == {"SDPA", "flash from blocks"}
    assert all(row.rivals_us.values())


def test_a_right_result_has_times() -> None:
    row = measure_case("double", case(rivals={"a": doubled, "b": doubled_in_place}), CPU, BUDGET_S)
    assert row.error is None
    assert row.us is not None
    assert row.us > 0
    assert row.rivals_us is not None
    assert all(row.rivals_us.values())


@pytest.mark.parametrize(("run", "error"), [(wrong, "AssertionError"), (broken, "RuntimeError: no kernel image")])
def test_a_wrong_result_has_none_and_the_rivals_have_theirs(
    run: object, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = measure_case("double", case(run=run, rivals={"a": doubled}), CPU, BUDGET_S)
    assert (row.us, row.host_us) == (None, None)
    assert row.error is not None
    assert row.error.startswith(error)
    assert "\n" not in row.error
    assert row.rivals_us is not None
    assert row.rivals_us["a"] is not None
    assert "Traceback" in capsys.readouterr().err
    assert "FAILED: " + error in as_text([row], ROOFLINE)


def test_a_wrong_rival_has_none() -> None:
    row = measure_case("double", case(rivals={"wrong": wrong, "broken": broken}), CPU, BUDGET_S)
    assert row.error is None
    assert row.rivals_us == {"wrong": None, "broken": None}
    assert "wrong failed, broken failed" in as_text([row], ROOFLINE)


def test_in_place_kernels_are_compared_with_original_inputs() -> None:
    row = measure_case("double", case(run=doubled_in_place, rivals={"a": doubled_in_place}), CPU, BUDGET_S)
    assert row.error is None
    assert row.rivals_us is not None
    assert row.rivals_us["a"] is not None


def test_rate_and_share_refer_to_the_kernels_bottleneck() -> None:
    moving = Row("copy", "", "float32", num_bytes=10**6, num_flop=0, us=20.0, host_us=20.0)
    assert (moving.rate(ROOFLINE), moving.share(ROOFLINE)) == ("50 GB/s", 0.5)
    multiplying = Row("product", "", "float32", num_bytes=10**6, num_flop=10**8, us=200.0, host_us=200.0)
    assert (multiplying.rate(ROOFLINE), multiplying.share(ROOFLINE)) == ("0.5 TFLOP/s", 0.5)


def test_quick_takes_the_last_choice_alone() -> None:
    assert Setting(CPU).choose(on_gpu=[1], on_cpu=[2, 3]) == [2, 3]
    assert Setting(CPU, is_quick=True).choose(on_gpu=[1], on_cpu=[2, 3]) == [3]


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Return the output and the JSON of the command for all kernels, so that the roofline is measured once."""
    file, printed, was_loaded = tmp_path_factory.mktemp("bench") / "rows.json", StringIO(), native.is_loaded()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(command, "QUICK_BUDGET_S", 1e-3)
        assert main(["--quick", "--device", "cpu", "--json", str(file)]) == 0
    if not was_loaded:
        native.unload()
    return printed.getvalue(), json.loads(file.read_text())


@pytest.mark.parametrize("kernel", find_kernels())
def test_every_kernel_has_rows_here(kernel: str, benchmark: tuple[str, dict[str, Any]]) -> None:
    printed, results = benchmark
    rows = [row for row in results["rows"] if row["kernel"].startswith(kernel)]
    assert rows
    assert all(row["us"] > 0 for row in rows)
    assert results["roofline"]["copy_gb_per_s"] > 0
    assert results["torch"] == torch.__version__
    assert kernel in printed


def test_cases_that_cannot_be_created_fail_the_run_and_keep_earlier_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cases(_: Setting) -> Iterator[Case]:
        yield case()
        raise MemoryError("too large")

    monkeypatch.setattr(rms_norm_cases, "cases", cases)
    assert main(["--quick", "--device", "cpu", "--only", "rms_norm"]) == 1
    output = capsys.readouterr().out
    assert "T=2" in output
    assert "FAILED: MemoryError: too large" in output


def test_an_unknown_kernel_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "rms_norm,warp"])
    assert "no kernel warp" in capsys.readouterr().err
