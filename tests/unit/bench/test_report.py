"""The report if one of its rows fails, cannot be drawn, or has nothing to divide by."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.console import Console

from penstock.ops.lab.bench import run
from penstock.ops.lab.bench.engines.growth import GrowthRow
from penstock.ops.lab.bench.engines.judge import Verdict
from penstock.ops.lab.bench.engines.quality import (
    FOLDER_VARIABLE,
    KL_LIMITS,
    LLAMA_DIVERGENCES,
    SMOLLM2,
    Divergence,
)
from penstock.ops.lab.bench.engines.row import QUANTIZED, EngineRow, SideRow
from penstock.ops.lab.bench.engines.sides import ALONE, ALONE_INT8, LLAMA_Q8, SERVED, VLLM_OFFLINE, choose_sides
from penstock.ops.lab.bench.other_load import CpuTimes, LoadWatch, OtherLoad, other_load
from penstock.ops.lab.bench.queue.durability import DurabilityCost
from penstock.ops.lab.bench.queue.follow import FollowRow
from penstock.ops.lab.bench.report import BenchReport, all_goals, engine_label, print_report
from penstock.ops.lab.bench.result import Figures
from penstock.ops.lab.bench.run import BenchOptions, run_bench
from penstock.shared.errors import ConfigurationError

from ...processes import DEADLINE_S

FOLLOWED = FollowRow(
    num_streams=1000,
    num_deltas=10,
    deltas_per_s=70_000.0,
    client_cpu_s=1.0,
    appended_per_s_unheard=90_000.0,
)
# A batch whose steps were not measured.
NO_GROWTH = GrowthRow(model="tiny", sizes=[], num_queued=1, kib_per_queued=1, kib_per_running=1, tokens_per_running=1)
CPU_S = 0.3


def options(json_path: Path, *rows: str) -> BenchOptions:
    """Return the command's options when only the rows are given."""
    return BenchOptions(
        rows=frozenset(rows),
        models=["tiny"],
        peers=frozenset(),
        peers_folder=Path("none"),
        num_requests=0,
        num_single=1,
        requests_per_s=0.0,
        rounds=1,
        seed=0,
        threads=1,
        engine_options=[],
        queue_depth=1,
        json_path=json_path,
    )


def report(**rows: object) -> BenchReport:
    return BenchReport(machine={}, versions={}, seed=0, command=[], **rows)  # type: ignore[arg-type]  # rows by name


def side(name: str, rate: float) -> SideRow:
    figures = dict.fromkeys(Figures.__struct_fields__, 0.0) | {"tokens_per_s": rate}
    verdict = Verdict(precision="bfloat16")
    rounds = [msgspec.convert(figures, Figures, strict=False)]
    return SideRow(name=name, checked=verdict, timed=verdict, rounds=rounds)


def engines(*sides: SideRow) -> EngineRow:
    return EngineRow(
        model="tiny", dtype="bfloat16", num_requests=2, num_single=1, seed=0, decode_bytes=1, sides=list(sides)
    )


def printed(of: BenchReport) -> str:
    console = Console(file=io.StringIO(), width=250)
    print_report(console, of)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.slow
def test_results_are_written_before_the_next_row_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", exc_type=ImportError, reason="the row of durability starts an engine")
    json_path = tmp_path / "results" / "bench.json"

    def fail() -> FollowRow:
        before.append(msgspec.json.decode(json_path.read_bytes(), type=BenchReport))
        raise ZeroDivisionError("float division by zero")

    before: list[BenchReport] = []
    monkeypatch.setattr(run, "measure_follow", fail)
    assert run_bench(options(json_path, "durability", "follow")) == 1
    (of_one_row,) = before
    assert of_one_row.durability is not None
    assert of_one_row.durability.batch_size == 64, "a step of no requests costs nothing"
    whole = msgspec.json.decode(json_path.read_bytes(), type=BenchReport)
    assert whole.durability == of_one_row.durability
    assert whole.failures["follow"].startswith("ZeroDivisionError: float division by zero (test_report.py, line")
    assert set(whole.other_load) <= {"durability", "follow"}
    assert [path.name for path in json_path.parent.iterdir()] == ["bench.json"]
    out = capsys.readouterr().out
    assert "ms per step of 64 requests" in out
    assert "failed: follow: ZeroDivisionError" in out


def test_a_row_that_cannot_be_drawn_is_reported_and_the_others_are_drawn() -> None:
    page = report(growth=NO_GROWTH, follow=FOLLOWED)
    page.goals = all_goals(page)
    text = printed(page)
    assert "70,000" in text
    assert [goal.model for goal in page.goals] == ["none"]
    assert "failed: growth: IndexError" in text


def test_a_rate_of_nothing_has_no_share_and_no_ratio() -> None:
    cost = DurabilityCost(batch_size=64, append_ms=0.5, publish_ms=0.4)
    assert cost.share_of(6400.0) == pytest.approx(0.01)
    assert cost.share_of(0.0) is None
    assert cost.share_of(None) is None
    row = engines(side(ALONE, 100.0), side(SERVED, 0.0), side(VLLM_OFFLINE, 0.0))
    assert row.ratio(ALONE, VLLM_OFFLINE, "tokens_per_s") is None
    page = report(engines=[row], durability=cost)
    page.goals = all_goals(page)
    text = printed(page)
    assert "share of served" not in text
    assert not page.failures, text


def test_each_table_reports_the_load_of_other_processes() -> None:
    load = OtherLoad(ours_share=0.5, others_share=0.25, steal_share=0.0625, num_cores=2, wall_s=1.0)
    page = report(engines=[engines(side(ALONE, 100.0))], follow=FOLLOWED)
    page.other_load = {engine_label("tiny"): load, "follow": load}
    text = " ".join(printed(page).split())
    # Three of the engines; a caption may be broken into lines.
    assert text.count("other processes took 25%") == 4


def test_time_of_others_is_busy_time_minus_ours() -> None:
    before = CpuTimes(total_s=100.0, busy_s=50.0, steal_s=1.0, ours_s=10.0)
    after = CpuTimes(total_s=120.0, busy_s=65.0, steal_s=2.0, ours_s=20.0)
    load = other_load(before, after, 2)
    assert load == OtherLoad(ours_share=0.5, others_share=0.25, steal_share=0.05, num_cores=2, wall_s=10.0)
    assert other_load(before, before, 2) is None


@pytest.mark.parametrize("leaves", [False, True], ids=["a child", "a server that leaves us"])
def test_time_of_our_processes_is_ours(tmp_path: Path, leaves: bool) -> None:
    """Also that of one with another parent, if it works in the run's folder, as the embedded Redis does."""
    burn = (
        "import os, sys, time\n"
        f"if {leaves}:\n"
        "    if os.fork():\n        os._exit(0)\n"
        "    os.setsid()\n"
        f"while time.process_time() < {CPU_S}: pass\n"
        "open('pid', 'w').write(str(os.getpid()))\n"
        f"if {leaves}:\n    sys.stdin.read()\n"
    )
    pid_file = tmp_path / "pid"
    with LoadWatch(tmp_path) as watch:
        burner = subprocess.Popen([sys.executable, "-c", burn], cwd=tmp_path, stdin=subprocess.PIPE)
        burner.wait(DEADLINE_S)
        deadline = time.monotonic() + 60
        while not (pid_file.exists() and pid_file.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        pid = int(pid_file.read_text())
        assert leaves == psutil.pid_exists(pid)
    assert burner.stdin is not None
    burner.stdin.close()
    if watch.found is None:
        pytest.skip("this kernel counts no CPU time")
    ours_s = watch.found.ours_share * watch.found.wall_s * watch.found.num_cores
    assert ours_s >= 0.9 * CPU_S
    assert os.getpid() != pid


def test_a_quantised_speed_has_its_quality_beside_it() -> None:
    int8, rival = side(ALONE_INT8, 160.0), side(LLAMA_Q8, 120.0)
    for row in (int8, rival):
        row.timed = Verdict(precision="int8")
    int8.divergence = Divergence(model="SmolLM2-135M-Instruct", kl=0.0394, limit=0.045)
    rival.divergence = LLAMA_DIVERGENCES[LLAMA_Q8]
    lines = printed(report(engines=[engines(side(ALONE, 100.0), int8, rival)])).splitlines()
    for name, quality in ((ALONE_INT8, "0.039, SmolLM2-135M-Instruct"), (LLAMA_Q8, "0.001, SmolLM2-135M")):
        with_speed = [line for line in lines if name in line and "outputs" not in line]
        assert len(with_speed) == 2
        assert all(quality in line for line in with_speed)


def test_every_quantised_side_has_a_quality(tmp_path: Path) -> None:
    sides = [side for side in choose_sides(frozenset({"llama"}), tmp_path, []) if side.precision]
    assert {side.precision for side in sides} == set(QUANTIZED)
    for side in sides:
        assert side.name in LLAMA_DIVERGENCES or (side.precision, "bfloat16") in KL_LIMITS


def test_a_side_that_costs_more_quality_than_is_allowed_is_wrong() -> None:
    assert Divergence(model="m", kl=0.05, limit=0.045).wrong == (
        "its KL divergence from float32 is 0.0500 nats on m, and at most 0.045 is allowed"
    )
    assert Divergence(model="m", kl=0.04, limit=0.045).wrong == ""
    assert Divergence(model="random", kl=9.0).wrong == ""


def test_a_real_model_is_found_by_its_folder_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert SMOLLM2.find() is None
    (tmp_path / "smollm2.gguf").write_bytes(b"GGUF")
    model = SMOLLM2.find()
    assert model is not None
    assert model == tmp_path / "smollm2.gguf"
    with pytest.raises(ConfigurationError, match=f"not {SMOLLM2.sha256}; install it again"):
        SMOLLM2.check(model)
