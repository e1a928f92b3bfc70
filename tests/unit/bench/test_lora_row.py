"""The requests of the row lora, and its table and goals of the runs."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from penstock.ops.lab.bench.goals import State
from penstock.ops.lab.bench.lora.folders import adapter_folder
from penstock.ops.lab.bench.lora.report import lora_goals, lora_table
from penstock.ops.lab.bench.lora.row import EIGHT, NONE, NUM_ADAPTERS, ONE, OURS, VLLM, LoraRow, LoraSide, on_phases
from penstock.ops.lab.bench.workload import WARM_UP, Item, write_workload
from penstock.worker.engine.offline.run import Workload, read_workload


def test_phases_differ_in_their_adapters_alone(tmp_path: Path) -> None:
    items = [Item([number, 9], 5 + number) for number in range(1, 11)]
    phases = {phase.name: phase for phase in on_phases(items, tmp_path)}
    assert list(phases) == [WARM_UP, NONE, ONE, EIGHT]
    for name in (NONE, ONE, EIGHT):
        assert [(item.prompt_token_ids, item.max_tokens) for item in phases[name].items] == [
            (item.prompt_token_ids, item.max_tokens) for item in items
        ]
    folders = [str(adapter_folder(tmp_path, number)) for number in range(NUM_ADAPTERS)]
    assert {item.adapter for item in phases[NONE].items} == {""}
    assert {item.adapter for item in phases[ONE].items} == {folders[0]}
    assert [item.adapter for item in phases[EIGHT].items] == (folders * 2)[: len(items)]
    # All are loaded before anything is timed.
    assert [item.adapter for item in phases[WARM_UP].items] == folders


def test_the_engine_reads_them(tmp_path: Path) -> None:
    write_workload(on_phases([Item([1, 2], 3)], tmp_path), tmp_path / "workload.json")
    workload: Workload = read_workload(tmp_path / "workload.json")
    assert [phase.requests[0].adapter for phase in workload.phases[1:]] == [
        "",
        *([str(adapter_folder(tmp_path, 0))] * 2),
    ]


def row_of(*sides: LoraSide) -> LoraRow:
    return LoraRow(model="m", dtype="bfloat16", rounds=2, num_requests=64, sides=list(sides))


def test_each_is_held_against_the_engine_without() -> None:
    ours = LoraSide(name=OURS, off=[100.0, 200.0], on={NONE: [100.0, 200.0], ONE: [96.0, 192.0], EIGHT: [80.0, 160.0]})
    rival = LoraSide(name=VLLM, off=[50.0, 100.0], on={NONE: [50.0, 90.0], ONE: [48.0, 48.0], EIGHT: [80.0, 40.0]})
    goals = {goal.what: (goal.value, goal.state) for goal in lora_goals(row_of(ours, rival))}
    assert goals == {
        f"tokens/s with adapters, {ONE}, over an engine without": (0.96, State.MET),
        f"tokens/s with adapters, {EIGHT}, over an engine without": (0.8, State.NOT_MET),
        f"tokens/s with adapters, {ONE}, alone over vLLM offline": (3.0, State.MET),
        f"tokens/s with adapters, {EIGHT}, alone over vLLM offline": (2.5, State.MET),
    }


def test_wrong_or_missing_sides_have_no_speed() -> None:
    row = row_of(LoraSide(name=OURS, wrong="with adapter 1"), LoraSide(name=VLLM, missing="not installed"))
    assert all(goal.value is None for goal in lora_goals(row))
    console = Console(file=io.StringIO(), width=200, record=True)
    console.print(lora_table(row))
    text = " ".join(console.export_text().split())
    assert "wrong" in text
    assert "with adapter 1" in text
    assert "not installed" in text


def test_errors_in_mixed_batches_are_reported_next_to_the_speed() -> None:
    side = LoraSide(name=VLLM, wrong_mixed="token 0", off=[50.0], on={NONE: [50.0], ONE: [40.0], EIGHT: [30.0]})
    console = Console(file=io.StringIO(), width=300, record=True)
    console.print(lora_table(row_of(side)))
    text = " ".join(console.export_text().split())
    assert "wrong where a batch has requests with and without: token 0" in text
    assert "40.0, 0.80" in text
