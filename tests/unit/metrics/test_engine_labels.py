"""The engine of each series, over restarts and where names meet."""

from __future__ import annotations

import msgspec

from penstock.shared.deployment.records import DeviceUse, EngineHeartbeat
from penstock.shared.messages.supervision import EngineState
from penstock.shared.metrics import engines_samples
from penstock.shared.metrics.exposition import expose


def beat(engine_id: str, name: str, started_at: float, model: str = "m") -> EngineHeartbeat:
    return EngineHeartbeat(
        worker_id="w",
        engine_id=engine_id,
        engine_name=name,
        model=model,
        state=EngineState.READY,
        host="h",
        worker_pid=1,
        core_pid=2,
        started_at=started_at,
    )


def labels(*beats: EngineHeartbeat) -> list[tuple[str, ...]]:
    return [sample.labels for sample in engines_samples(beats) if sample.spec.name == "engine_up"]


def test_an_engine_keeps_its_label_when_its_worker_begins_again() -> None:
    first, second = beat("h-1-aaaa-0", "h-0", 1.0), beat("h-2-bbbb-0", "h-0", 2.0)
    assert labels(first) == labels(second) == [("m", "h-0")]
    # For a moment both are there: no two series with the same labels, and the new one continues under the name.
    assert labels(second, first) == [("m", "h-0"), ("m", "h-1-aaaa-0")]


def test_a_name_is_one_of_a_model() -> None:
    assert labels(beat("a", "h-0", 1.0), beat("b", "h-0", 2.0, model="n")) == [("m", "h-0"), ("n", "h-0")]


def test_a_gpu_is_measured_where_one_is_and_its_values_are_known() -> None:
    use = DeviceUse(busy_share=0.5, used_bytes=3, total_bytes=4, temperature_c=61)
    samples = engines_samples([msgspec.structs.replace(beat("a", "h-0", 1.0), device_use=use), beat("b", "h-1", 1.0)])
    values = {(*sample.labels, sample.spec.name): sample.value for sample in samples if "gpu" in sample.spec.name}
    assert values == {
        ("m", "h-0", "engine_gpu_busy_share"): 0.5,
        ("m", "h-0", "engine_gpu_used_memory_bytes"): 3,
        ("m", "h-0", "engine_gpu_total_memory_bytes"): 4,
        ("m", "h-0", "engine_gpu_temperature_celsius"): 61,
    }


def test_an_engine_of_an_earlier_version_goes_by_its_id() -> None:
    assert labels(beat("a", "", 1.0), beat("b", "", 2.0)) == [("m", "a"), ("m", "b")]


def test_a_change_of_state_makes_no_new_series() -> None:
    text = expose(engines_samples([beat("a", "h-0", 1.0)])).decode()
    assert 'penstock_engine_up{engine="h-0",model_name="m"} 1.0' in text.splitlines()
    assert text.count("penstock_engine_state{") == len(EngineState)
