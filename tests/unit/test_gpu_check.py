"""The report of `make gpu-check` on its parts; a part that fails or hangs costs its own row alone."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.ops.lab.gpu_check.__main__ import _parts_by_worth, main, plan_lines, run_parts
from penstock.ops.lab.gpu_check.choice import parts_within
from penstock.ops.lab.gpu_check.correctness import check_engine
from penstock.ops.lab.gpu_check.engine import PartFailedError, kernels_chosen, measure_variant
from penstock.ops.lab.gpu_check.figures import (
    decode_figures,
    prefill_figures,
    serving_figures,
    sleep_figures,
    standby_figures,
)
from penstock.ops.lab.gpu_check.goals import Goal, add_shares, find_goals
from penstock.ops.lab.gpu_check.kernel_times import time_kernels
from penstock.ops.lab.gpu_check.plan import full_plan, quick_plan
from penstock.ops.lab.gpu_check.program import Ended, run_program
from penstock.ops.lab.gpu_check.report import goal_lines, lines_of
from penstock.ops.lab.gpu_check.results_file import ResultsFile
from penstock.ops.lab.gpu_check.shape import Shape

PYTHON = [sys.executable, "-c"]
ABOUT: dict[str, Any] = {"device": "H100", "commit": "a1", "is_quick": False}
ROOFLINE = {"copy_gb_per_s": 4000.0, "matmul_tflop_per_s": 800.0}


def kernel_row(kernel: str, **changes: Any) -> dict[str, Any]:
    plain = {"kernel": kernel, "shape": "T=1", "dtype": "bfloat16", "num_bytes": 4_000_000, "num_flop": 0}
    return plain | {"us": 1.0, "error": None, "share": 0.9, "rivals_us": {"torch": 2.0, "other": None}} | changes


def test_a_program_that_hangs_is_ended_with_its_children_and_its_words_are_kept(tmp_path: Path) -> None:
    hang = "import time; time.sleep(1000)"
    start = f"import subprocess; child = subprocess.Popen({[*PYTHON, hang]!r}); print(child.pid, flush=True)"
    limit_s = 1.0
    while not (ended := run_program([*PYTHON, f"{start}; {hang}"], tmp_path / "log", limit_s)).words:
        limit_s *= 2  # it was ended before it could begin
    assert ended == Ended(f"not done within {limit_s:.0f} s: {ended.words}", ended.words)
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(int(ended.words))
        give_up_at = time.monotonic() + 60
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < give_up_at, "the child lives on"
            time.sleep(0.01)


def test_the_choice_of_kernels_is_read_from_the_engine_s_log(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    assert kernels_chosen(log) == []
    log.write_text("[info] forward_mode mode=lean\n[info] kernels_chosen    fused_rows=4 part=feed\n")
    assert kernels_chosen(log) == ["fused_rows=4 part=feed"]


def test_the_last_lines_of_a_failed_program_are_reported(tmp_path: Path) -> None:
    assert run_program([*PYTHON, "pass"], tmp_path / "log", 240.0).is_well
    ended = run_program([*PYTHON, "raise SystemExit('no kernel image')"], tmp_path / "log", 240.0)
    assert ended.error == "ended with 1: no kernel image"


def test_the_engine_s_tests_that_want_a_gpu_are_run_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    marked = "import pytest\n\n@pytest.mark.gpu\n@pytest.mark.parametrize('found', [1, 2])\n"
    path.write_text(f"{marked}def test_it(found):\n    assert found == 1\n\ndef test_other():\n    assert False\n")
    results = check_engine(replace(full_plan("cuda"), engine_tests=(path,)), tmp_path, 240.0)
    assert {name: results[name] for name in ("error", "passed", "failed")} == {
        "error": "1 tests failed",
        "passed": 1,
        "failed": 1,
    }
    assert any("test_it[2]" in line for line in lines_of("engine-tests", {**results, "seconds": 1.0}))


def test_the_engine_s_gpu_tests_are_collected() -> None:
    names = {path.name for path in full_plan("cuda").engine_tests}
    assert {"test_captured.py", "test_graph_sizes.py", "test_identity.py", "test_structured_table.py"} <= names
    assert not any(name.startswith("test_gpu_") for name in names)


def test_a_part_that_fails_costs_its_own_row_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = ResultsFile(tmp_path / "results", ABOUT)
    reports: list[list[str]] = []

    def failing(_: Path, limit_s: float) -> dict[str, Any]:
        raise PartFailedError(f"gone within {limit_s > 0}")

    def mistaken(_: Path, limit_s: float) -> dict[str, Any]:
        reports.append(list(ResultsFile(tmp_path / "results", ABOUT).results()))
        raise KeyError("rows")

    def well(_: Path, limit_s: float) -> dict[str, Any]:
        return {"error": None, "roofline": ROOFLINE, "rows": [kernel_row("rms_norm")]}

    parts = {"correctness 1 of 1": failing, "kernels": well, "transformers tiny": mistaken, "engine tiny": well}
    assert run_parts(quick_plan("cpu"), parts, ["msgspec"], tmp_path, results) == 1
    assert reports == [["correctness 1 of 1", "kernels"]]
    assert {name: part["error"] for name, part in results.results().items()} == {
        "correctness 1 of 1": "gone within True",
        "kernels": None,
        "transformers tiny": "KeyError: 'rows'",
        "engine tiny": "missing here: msgspec",
    }
    report = capsys.readouterr().out
    assert "rms_norm T=1" in report
    assert "all parts have results" in report
    assert report.count("not measured") == report.count("≥") + report.count("≤")  # a quick run meets nothing


def test_a_check_continues_where_the_last_call_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, ran, now = tmp_path / "results", list[str](), [0.0]
    plan = replace(full_plan("cuda"), call_s=300.0)
    names = ["engine qwen06", "correctness 1 of 2", "field qwen06 128-1024", "correctness 2 of 2", "sleep qwen8b"]

    def part_of(name: str) -> Any:
        def part(_: Path, limit_s: float) -> dict[str, Any]:
            ran.append(name)
            now[0] += 60.0
            return {"error": None}

        return part

    def call(about: dict[str, Any], call_s: float = 300.0) -> list[str]:
        ran.clear()
        # It ends with the last call, in the middle of a line.
        with path.open("a") as file:
            file.write('{"part": "sle')
        run_parts(
            replace(plan, call_s=call_s),
            {name: part_of(name) for name in names},
            [],
            tmp_path,
            ResultsFile(path, about),
            lambda: now[0],
        )
        return list(ran)

    # Tests first. A part begins only if its limit fits: 270 s are too much for the 180 that are left.
    assert call(ABOUT) == ["correctness 1 of 2", "correctness 2 of 2", "engine qwen06", "sleep qwen8b"]
    assert "1 parts are left for the next call: field qwen06 128-1024" in capsys.readouterr().out
    assert call(ABOUT) == ["field qwen06 128-1024"]
    assert call(ABOUT) == []
    # Another commit is measured again, in the time that each part took; on another card limits count again.
    assert call({**ABOUT, "commit": "b2"}, 100.0) == ["correctness 1 of 2"]
    assert call({**ABOUT, "device": "H200"}, 100.0) == ["engine qwen06"]
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    assert {"at", "commit", "device", "part", "state"} <= set(lines[0])


def test_a_part_that_ends_the_call_twice_is_not_begun_again(tmp_path: Path) -> None:
    plan = full_plan("cuda")
    for _ in range(2):
        results = ResultsFile(tmp_path / "results", ABOUT)
        assert next(parts_within(["kernels", "engine qwen06"], plan, results, 200.0))[0] == "kernels"
        results.begin("kernels")
    results = ResultsFile(tmp_path / "results", ABOUT)
    assert [name for name, _ in parts_within(["kernels", "engine qwen06"], plan, results, 200.0)] == ["engine qwen06"]
    assert "cut off" in results.results()["kernels"]["error"]


def test_the_plan_prefers_what_was_never_measured(tmp_path: Path) -> None:
    path, plan = tmp_path / "results", full_plan("cuda")
    ResultsFile(path, {**ABOUT, "commit": "old"}).end("engine qwen06", {"error": None, "seconds": 40.0})
    parts = ["engine qwen06", "field qwen8b 128-1024", "sleep qwen8b", "correctness 1 of 1"]
    lines = list(plan_lines(parts, plan, ResultsFile(path, ABOUT)))
    ten = ["   150 s  correctness 1 of 1", "   270 s  field qwen8b 128-1024", "    90 s  sleep qwen8b"]
    assert lines[:5] == ["next 10 minutes: 4 parts, 570 s at most", *ten, "    60 s  engine qwen06"]
    assert [line for line in lines if line.startswith("next")][1:] == [
        "next 20 minutes: 4 parts, 570 s at most",
        "next 30 minutes: 4 parts, 570 s at most",
    ]


@pytest.mark.usefixtures("warm_python")
def test_without_a_gpu_the_check_fails_and_names_the_cause(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main([]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("torch sees no GPU here. Needed are an NVIDIA GPU and a Python with ")
    assert "torch, transformers, triton" in captured.err
    assert captured.err.endswith("; --device cpu --quick tries this command out without a GPU\n")


def test_kernels_behind_one_that_loses_the_device_or_hangs_are_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def bench(command: list[str], log: Path, limit_s: float) -> Ended:
        """``b`` loses the device, so ``c`` gets nothing of that process; ``d`` hangs."""
        kernels = command[command.index("--only") + 1].split(",")
        calls.append(kernels)
        errors = {"b": "RuntimeError: CUDA error: an illegal memory access"}
        if "b" in kernels:
            errors["c"] = "RuntimeError: CUDA error: again"
        finished = kernels[: kernels.index("d")] if "d" in kernels else kernels
        rows = [kernel_row(kernel, error=errors.get(kernel)) for kernel in finished]
        report = {"rows": rows, "roofline": ROOFLINE, "kernels": finished}
        Path(command[command.index("--json") + 1]).write_text(json.dumps(report))
        return Ended("not done within 9 s: d", "d") if "d" in kernels else Ended("", "")

    monkeypatch.setattr("penstock.ops.lab.gpu_check.kernel_times.run_program", bench)
    plan = quick_plan("cpu")
    object.__setattr__(plan, "kernels", ("a", "b", "c", "d", "e"))
    results = time_kernels(plan, tmp_path, 100.0)
    assert calls == [["a", "b", "c", "d", "e"], ["c", "d", "e"], ["e"]]
    errors_by_kernel = {row["kernel"]: row["error"] for row in results["rows"]}
    assert (errors_by_kernel["a"], errors_by_kernel["c"], errors_by_kernel["e"]) == (None, None, None)
    assert "illegal" in errors_by_kernel["b"]
    assert errors_by_kernel["d"] == "not done within 9 s: d"
    assert results["error"] == "without a time or with a wrong result: b, d"


def test_decode_is_timed_while_all_decode() -> None:
    # The second request has its first token at 5, the first its last at 9; one step of those between took longer.
    times = [[1.0, 2.0, 5.0, 6.0, 7.0, 8.5, 9.0], [5.0, 6.0, 7.0, 8.5, 9.0, 10.0, 11.0]]
    steps = [[2, 1, 9, 1, 1.0, 1.0, 1.0], [2, 0, 0, 2, 0.1, 0.7, 0.2], [2, 0, 0, 2]]
    figures = decode_figures({"token_times_s": times, "steps": steps}, 10)
    assert (figures["batch"], figures["num_steps"]) == (2, 4)
    assert figures["ms_per_step"] == pytest.approx(1000)
    assert figures["mean_ms_per_step"] == pytest.approx(1000)
    assert figures["context_tokens"] == pytest.approx(10 + (5 + 3) / 2)
    assert figures["host_share"] == pytest.approx((0.3 + 0.0) / 2)


def test_decode_without_such_a_time_is_refused() -> None:
    with pytest.raises(ValueError, match="only 0 steps in which all 2"):
        decode_figures({"token_times_s": [[1.0, 2.0], [3.0, 4.0]], "steps": []}, 10)


def test_serving_and_prefill() -> None:
    phase = {"token_times_s": [[1.0, 2.0, 4.0], [3.0]], "sent_s": [0.0, 1.0], "wall_s": 4.0}
    figures = serving_figures({**phase, "output_token_ids": [[1, 2, 3], [4]]})
    assert (figures["tokens_per_s"], figures["ttft_p50_ms"], figures["ttft_p99_ms"]) == (1.0, 1000.0, 2000.0)
    assert (figures["itl_p50_ms"], figures["itl_p99_ms"]) == (1000.0, 2000.0)
    assert prefill_figures(phase, 3000) == {"num_tokens": 3000, "ms": 1500.0, "tokens_per_s": 2000.0}


def test_lower_bound_of_a_steps_time(tmp_path: Path) -> None:
    config = {"hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 3}
    config |= {"num_hidden_layers": 5, "intermediate_size": 7, "vocab_size": 11}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = Shape.read(tmp_path)
    weights = 5 * (4 * 6 + 2 * 4 * 3 + 6 * 4 + 3 * 4 * 7) + 11 * 4
    assert shape.decode_bytes(2, 10.0) == 2 * (weights + 2 * 10 * 5 * 2 * 3)
    in_bytes = replace(shape, weight_bytes=1)
    assert shape.decode_bytes(2, 10.0) - in_bytes.decode_bytes(2, 10.0) == weights
    in_bytes = replace(shape, cached_bytes=1)
    assert shape.decode_bytes(2, 10.0) - in_bytes.decode_bytes(2, 10.0) == 2 * 10 * 5 * 2 * 3
    layers = weights - 11 * 4
    assert shape.prefill_flop(10) == 2 * 10 * layers + 2 * 11 * 4 + 4 * 5 * 6 * 10 * 10 / 2


def test_goals_are_met_missed_or_not_measured() -> None:
    decode = [{"batch": 1, "ms_per_step": 2.0, "mean_ms_per_step": 2.0, "tokens_per_s": 500.0, "host_share": 0.1}]
    decode[0]["bytes_per_step"] = 5.6e9  # 1.4 ms at 4000 GB/s
    prefill = {"num_tokens": 8192, "ms": 10.0, "tokens_per_s": 8e5, "flop": 4e12}  # 5 ms at 800 TFLOP/s
    mixed = serving_figures({"token_times_s": [[1.0]], "sent_s": [0.0], "wall_s": 1.0, "output_token_ids": [[1]]})
    parts: dict[str, Any] = {
        "correctness 1 of 1": {"error": None, "passed": 3, "failed": 0, "skipped": 0, "files": []},
        "field big": {
            "error": None,
            "field": [{**mixed, "concurrency": 1, "published": 0.5}, {**mixed, "concurrency": 2, "published": None}],
        },
        "kernels": {
            "error": None,
            "roofline": ROOFLINE,
            "rows": [
                kernel_row("copy", share=0.5),
                kernel_row("copy", num_bytes=10**9, share=0.9, shape="T=9"),
                kernel_row("product", num_flop=10**12),
                kernel_row("wrong", error="AssertionError"),
            ],
        },
        "engine qwen06": {
            "error": None,
            "decode": decode,
            "prefill": prefill,
            "mixed": mixed,
            "device_idle_share": None,
            "kernels_chosen": ["fused_rows=16 part=enter"],
        },
        "engine qwen06 fp8 cache": {
            "error": None,
            "decode": [{**decode[0], "tokens_per_s": 800.0}, {**decode[0], "batch": 7}],
        },
        "engine qwen06 deterministic": {"error": None, "decode": [{**decode[0], "tokens_per_s": 440.0}]},
        "transformers qwen06": {"error": None, "mixed": {**mixed, "tokens_per_s": 0.25}},
    }
    add_shares(parts)
    goals = {goal.what: goal for goal in find_goals(parts, ("copy", "product", "wrong"), ("qwen06",))}
    assert {what: goal.state for what, goal in goals.items() if "level" not in what and "wake" not in what} == {
        "kernels' tests on the device that fail": "met",
        "field big, 1 requests: tokens/s over vLLM's published on an H100": "met",
        "copy: share of the copy's bandwidth, T=9": "met",
        "wrong: share of the copy's bandwidth": "not measured",
        "qwen06, decode at batch 1: share of bandwidth": "met",
        "qwen06, decode at batch 64: share of bandwidth": "not measured",
        "qwen06, prefill: share of the matmul rate": "not met",
        "qwen06, batch 64: share of time in which the device idles": "not measured",
        "qwen06, deterministic at batch 1: tokens/s over plain": "not met",
        "qwen06, deterministic at batch 64: tokens/s over plain": "not measured",
        "qwen06, seconds from a kill to the next token with a standby": "not measured",
        "qwen06, seconds until an engine serves": "not measured",
        "qwen06, mixed: tokens/s over transformers continuous": "not met",
    }
    assert goals["qwen06, decode at batch 1: share of bandwidth"].value == pytest.approx(0.7)
    assert next(goal.at_least for goal in find_goals(parts, (), ("qwen8b",)) if "decode at batch 1" in goal.what) == 0.8
    assert [row["over_plain"] for row in parts["engine qwen06 fp8 cache"]["decode"]] == [1.6, None]
    table = "\n".join(line for name, part in parts.items() for line in lines_of(name, part | {"seconds": 1.0}))
    assert "70% of the bandwidth bound" in table
    assert "chosen by time: fused_rows=16 part=enter" in table
    assert "1.60 times the tokens without" in table
    assert "torch 2.00, other failed" in table
    assert "FAILED: AssertionError" in table
    assert any("not met" in line and "≥ 5" in line for line in goal_lines([goal.as_json() for goal in goals.values()]))


def test_tests_that_could_not_run_to_their_end_are_no_success() -> None:
    parts = {"correctness 1 of 1": {"error": "no test passed", "passed": 0, "failed": 0}}
    assert next(find_goals(parts, (), ("big",))).state == "not measured"
    passed = {"error": None, "passed": 3, "failed": 0}
    assert next(find_goals({"correctness 1 of 2": passed}, (), ("big",))).state == "not measured"
    assert Goal(what="failing", value=2, at_most=0).state == "not met"


def test_the_whole_plan_takes_every_test_and_kernel_and_ends_in_time() -> None:
    plan = full_plan("cuda")
    assert {"test_gpu_sampling.py", "test_gpu_lora.py"} <= {path.name for path in plan.test_files}
    assert {"sampling", "rms_norm"} <= set(plan.kernels)
    # A call ends within nine minutes, and any part fits into one.
    assert plan.call_s <= 9 * 60 - 15
    assert max(plan.limits_s.values()) <= plan.call_s
    assert set(plan.variant_batches) <= set(plan.batches), "else nothing to compare with"
    assert {variant.shape for variant in plan.variants} <= set(plan.shapes)
    for option, formats in (("--quantization", {"int8", "fp8"}), ("--kv-cache-dtype", {"int8", "fp8"})):
        assert {variant.options[1] for variant in plan.variants if variant.options[0] == option} == formats


def test_checks_that_need_more_gpus_are_skipped_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "engine qwen8b tensor parallel 2"
    parts = _parts_by_worth(full_plan("cuda"), (), num_gpus=1)
    results = ResultsFile(tmp_path / "results", ABOUT)
    assert run_parts(full_plan("cuda"), {name: parts[name]}, [], tmp_path, results) == 0
    assert f"{name} (0 s): needs 2 GPUs" in capsys.readouterr().out
    # On a CPU ranks are processes, and with two GPUs it is measured.
    quick = _parts_by_worth(quick_plan("cpu"), (), num_gpus=0)["engine tiny tensor parallel 2"]
    whole = _parts_by_worth(full_plan("cuda"), (), num_gpus=2)[name]
    assert quick.func is whole.func is measure_variant  # type: ignore[attr-defined]


def test_the_goals_of_a_standby_are_met_by_the_slowest_of_all_requests() -> None:
    def part(*seconds: float) -> dict[str, Any]:
        measured = {"seconds": seconds, "standby_bytes": 3 << 30, "ready_s": 2.0 + seconds[-1]}
        return {"error": None, "seconds": 1.0, **standby_figures(measured)}

    def states_with(standby: dict[str, Any]) -> set[str]:
        goals = find_goals({"standby big": standby}, (), ("big",))
        return {goal.state for goal in goals if "kill" in goal.what or "serves" in goal.what}

    good = part(0.3, 0.9, 0.2)
    assert (states_with(good), states_with(part(0.1, 1.1)), states_with({})) == ({"met"}, {"not met"}, {"not measured"})
    line = "  ready after 2.2 s; kill to next token p50 0.300 s, greatest of 3 0.900 s; the standby takes 3.00 GiB"
    assert list(lines_of("standby big", good))[1:] == [line]


def test_goals_of_sleep_are_met_by_fast_wakes_that_leave_no_memory() -> None:
    def part(wake_s: float, asleep_bytes: tuple[int, ...]) -> dict[str, Any]:
        cycles = [
            {"sleep_s": 0.1, "wake_s": wake_s, "first_s": 0.2, "asleep_bytes": num_bytes} for num_bytes in asleep_bytes
        ]
        levels = [sleep_figures({"level": level, "cycles": cycles, "is_same": True}) for level in (1, 2)]
        return {"error": None, "seconds": 1.0, "levels": levels}

    def states(sleep: dict[str, Any]) -> list[str]:
        return [goal.state for goal in find_goals({"sleep big": sleep}, (), ("big",))][-7:]

    gib = 1 << 30
    # The first sleep may leave less.
    good = part(1.2, (gib // 2, gib, gib))
    assert states(good) == ["met"] * 7
    assert states(part(1.6, (gib, gib, 2 * gib))) == ["not met", *["not met", "not met", "met"] * 2]
    assert states({}) == ["not measured"] * 7
    assert (
        "3 sleeps of 0.100 s, wakes of 1.200 s, 1.00 GiB asleep, +0.0% over all" in list(lines_of("sleep big", good))[1]
    )
