"""What a chaos run of several models concludes from the records of their devices."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from safetensors.numpy import load_file

from penstock.ops.cli import main
from penstock.ops.demo.run import MODEL
from penstock.ops.lab.chaos.owners import Owners
from penstock.ops.lab.chaos.several_models import (
    SwapFigures,
    SwapWatch,
    least_bytes,
    make_models,
)
from penstock.ops.lab.chaos.verdict import judge
from penstock.ops.local.stack import LocalStack
from penstock.shared.messages.devices import DeviceRecord, SwapCount, SwapRecord


def record(device_id: str, num_swaps: int, took_s: float = 1.0) -> DeviceRecord:
    return DeviceRecord(
        device_id=device_id,
        worker_id=device_id,
        host="h",
        device="cpu",
        last_swap=SwapRecord(at=float(num_swaps), entered="a", took_s=took_s) if num_swaps else None,
        swap_counts=[SwapCount(entered="a", count=num_swaps)] if num_swaps else [],
    )


def watch_of(*models: str) -> SwapWatch:
    stack = SimpleNamespace(url="", workers=[SimpleNamespace(pid=0, ready_time_s=2.0)])
    return SwapWatch(cast(LocalStack, stack), models)


def test_swaps_of_a_supervisor_that_was_started_again_add_up() -> None:
    watch = watch_of("a")
    for each in (record("first", 0), record("first", 3), record("first", 5), record("second", 0), record("second", 2)):
        watch.count(each)
    assert watch.num_swaps == 7


def test_a_model_that_is_not_served_after_the_last_fault_is_a_harm() -> None:
    watch = watch_of("a", "b")
    watch.count(record("d", 1))
    watch.served("b")
    assert watch.figures().unserved == []
    watch.fault()
    watch.served("a")
    figures = watch.figures()
    assert figures.unserved == ["b"]
    assert not watch.is_settled
    watch.served("b")
    assert watch.is_settled
    assert watch.figures().unserved == []
    watch.fault()
    assert watch.figures().unserved == ["a", "b"]


def test_a_model_served_beyond_the_bound_is_a_harm() -> None:
    figures = SwapFigures(served_after_s={"a": 9.0, "b": 11.0, "c": None}, bound_s=10.0)
    assert figures.unserved == ["b", "c"]
    verdict = judge([], [], Owners(num_records=1), num_kills=1, num_unserved=len(figures.unserved))
    assert (verdict.unserved, verdict.num_harms) == (2, 2)


def test_models_differ(tmp_path: Path) -> None:
    first, second = (load_file(path / "model.safetensors") for path in make_models(tmp_path, 2))
    assert first.keys() == second.keys()
    assert all(not np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["0"], "--models must be a number from 1 on, above 1 with --swaps, or several models, got 0"),
        (["demo"], "or several models, got demo"),
        (["demo", "nowhere.gguf"], "--models nowhere.gguf is neither demo nor a file or folder"),
        (["demo", "demo"], "--models must be different ones, got demo demo"),
        (["demo", str(MODEL)], "--models MODEL MODEL … and --device-memory SIZE need each other"),
        (["3", "--device-memory", "1GiB"], "--models MODEL MODEL … and --device-memory SIZE need each other"),
    ],
)
def test_models_that_cannot_share_a_device(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--models", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_memory_of_awake_models_is_no_growth_and_ended_processes_do_not_count() -> None:
    supervisor, ended = {1: 40}, {9: 300}
    samples = [
        supervisor | ended | {2: 250, 3: 100},
        supervisor | {2: 100, 3: 240},
        supervisor | {2: 250, 3: 102},
    ]
    assert least_bytes(samples) == 40 + 100 + 100
    assert least_bytes([]) == 0
