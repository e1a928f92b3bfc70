"""Metrics of devices that several models share."""

from __future__ import annotations

from typing import Any

from penstock.shared.messages.devices import SWAP_TIME_S, DeviceModel, DeviceRecord, ModelPhase, SwapCount
from penstock.shared.metrics import devices_samples
from penstock.shared.metrics.exposition import expose
from penstock.shared.stats import Histogram


def record(device_id: str = "gpu1-7/cuda:0", **changes: Any) -> DeviceRecord:
    values: dict[str, Any] = {
        "worker_id": "gpu1-7",
        "host": "gpu1",
        "device": "cuda:0",
        "budget_bytes": 100,
        "host_budget_bytes": 50,
    }
    return DeviceRecord(device_id=device_id, **values | changes)


def lines(*devices: DeviceRecord) -> list[str]:
    return expose(devices_samples(devices)).decode().splitlines()


def test_states_swaps_and_times_are_exposed() -> None:
    wakes = Histogram.empty(SWAP_TIME_S)
    wakes.observe(0.2)
    model = DeviceModel(
        name="coder",
        phase=ModelPhase.ASLEEP,
        level=1,
        standing_s=2.5,
        wake_failures={"engine_call_failed": 3},
        num_recomputed_tokens=70,
        wakes={"1": wakes},
        sleeps={"2": wakes},
    )
    swaps = [SwapCount(left="chat", entered="coder", reason="late", count=4), SwapCount(entered="chat", count=1)]
    text = lines(record(models=[model], swap_counts=swaps, swap_share=0.25, debt_s=-1.5))
    for line in (
        'penstock_model_state{device="gpu1/cuda:0",model_name="coder",state="asleep"} 1.0',
        'penstock_model_state{device="gpu1/cuda:0",model_name="coder",state="awake"} 0.0',
        'penstock_model_standing_seconds{device="gpu1/cuda:0",model_name="coder"} 2.5',
        'penstock_recomputed_tokens_total{device="gpu1/cuda:0",model_name="coder"} 70.0',
        'penstock_wake_failures_total{cause="engine_call_failed",device="gpu1/cuda:0",model_name="coder"} 3.0',
        'penstock_swap_seconds_count{device="gpu1/cuda:0",direction="wake",level="1",model_name="coder"} 1.0',
        'penstock_swap_seconds_sum{device="gpu1/cuda:0",direction="sleep",level="2",model_name="coder"} 0.2',
        'penstock_swaps_total{device="gpu1/cuda:0",from="chat",reason="late",to="coder"} 4.0',
        'penstock_swaps_total{device="gpu1/cuda:0",from="",reason="empty",to="chat"} 1.0',
        'penstock_swap_share{device="gpu1/cuda:0"} 0.25',
        'penstock_swap_debt_seconds{device="gpu1/cuda:0"} -1.5',
        'penstock_device_budget_bytes{device="gpu1/cuda:0",part="device"} 100.0',
        'penstock_device_budget_bytes{device="gpu1/cuda:0",part="host"} 50.0',
    ):
        assert line in text


def test_a_phase_of_a_newer_version_is_none_of_the_known_states() -> None:
    text = lines(record(models=[DeviceModel(name="coder", phase="moving")]))
    states = [line for line in text if line.startswith("penstock_model_state{")]
    assert len(states) == len(ModelPhase)
    assert all(line.endswith(" 0.0") for line in states)


def test_a_device_has_the_same_label_in_all_runs_of_its_worker() -> None:
    first, second = record("gpu1-1/cuda:0"), record("gpu1-2/cuda:0")
    label = 'penstock_swap_share{device="gpu1/cuda:0"} 0.0'
    assert label in lines(first)
    assert label in lines(second)
    # For a moment both are there: the series of the new one continues, and no two series have the same labels.
    both = [line for line in lines(second, first) if line.startswith("penstock_swap_share{")]
    assert both == [label, 'penstock_swap_share{device="gpu1-1/cuda:0"} 0.0']
