"""Memory of models that share a device, and the lock of the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.errors import ConfigurationError
from penstock.worker.keeper.lock import device_lock
from penstock.worker.keeper.memory import ModelBytes, cache_bytes, files_state, own_bytes, reserved_bytes, size_problem

MODELS = st.lists(
    st.builds(
        ModelBytes,
        weights=st.integers(0, 300),
        process=st.integers(0, 50),
        cache=st.none() | st.integers(0, 100),
        is_pinned=st.booleans(),
        least_cache=st.integers(0, 200),
    ),
    min_size=1,
    max_size=5,
)


def caches(budget: int, models: Sequence[ModelBytes]) -> list[int]:
    return [cache_bytes(budget, model, models) for model in models]


@given(MODELS, st.integers(1, 2000))
def test_a_model_with_a_derived_cache_fits_beside_pinned_ones(models: list[ModelBytes], budget: int) -> None:
    sizes = caches(budget, models)
    awake = [model.weights + model.process + size for model, size in zip(models, sizes, strict=True)]
    pinned = sum(size for model, size in zip(models, awake, strict=True) if model.is_pinned)
    for model, size, used in zip(models, sizes, awake, strict=True):
        assert size >= 0
        fits = (used if model.is_pinned else pinned + used) <= budget
        if model.cache is not None:
            assert size == model.cache
        elif not model.is_pinned:
            assert fits or not size
            # Processes that sleep, and may end, leave it half of what there is, and a request of maximum length.
            rest = max(0, budget - pinned - model.weights - model.process)
            assert size >= max(rest // 2, min(rest, model.least_cache))
        if not model.is_pinned:
            assert bool(size_problem(budget, "m", model, models)) == (not (fits and size))


def test_models_without_options_have_the_same_share() -> None:
    model = ModelBytes(weights=40, process=10)
    assert caches(100, [model]) == [50]
    # The process of the other one is reserved for.
    assert caches(100, [model, ModelBytes(weights=20, process=10)]) == [40, 60]
    pinned = ModelBytes(weights=20, process=10, is_pinned=True)
    assert caches(100, [pinned, model]) == [10, 10]
    # Large ones leave half of the rest, and less if a request of maximum length needs more.
    large = [ModelBytes(weights=20, process=60)]
    assert caches(100, [ModelBytes(weights=60, process=20), *large])[0] == 10
    assert caches(100, [ModelBytes(weights=60, process=20, least_cache=15), *large])[0] == 15
    # Of many sleeping processes only a quarter of the budget is reserved for.
    assert caches(100, [model] + [ModelBytes(weights=1, process=10) for _ in range(9)])[0] == 25


def test_the_reserve_of_a_process_grows_in_steps() -> None:
    assert reserved_bytes(128 << 20, 30 << 20) == 128 << 20
    assert reserved_bytes(128 << 20, (128 << 20) + 1) == 160 << 20


def test_files_and_processes_that_are_gone(tmp_path: Path) -> None:
    assert own_bytes([2**22 + 1]) == 0
    assert files_state(tmp_path / "nowhere") == ()
    file = tmp_path / "m.gguf"
    file.write_bytes(b"1")
    before = files_state(file)
    file.write_bytes(b"12")
    assert before != files_state(file) != ()


def test_a_gpu_belongs_to_one_worker_of_several_models(tmp_path: Path) -> None:
    with device_lock("GPU-1", "worker one (pid 1)", is_exclusive=True, folder=tmp_path):
        with (
            pytest.raises(ConfigurationError, match=r"device GPU-1 is kept by worker one \(pid 1\), which shares it"),
            device_lock("GPU-1", "worker two", is_exclusive=True, folder=tmp_path),
        ):
            pass
        with device_lock("GPU-2", "worker two", is_exclusive=True, folder=tmp_path):
            pass
    with device_lock("GPU-1", "worker two (pid 2)", is_exclusive=True, folder=tmp_path):
        pass


def test_a_second_worker_on_the_cpu_is_a_warning(tmp_path: Path) -> None:
    """A third one, too, though the first has ended."""
    with structlog.testing.capture_logs() as logs, ExitStack() as later:
        with device_lock("cpu", "worker one", is_exclusive=False, folder=tmp_path):
            later.enter_context(device_lock("cpu", "worker two", is_exclusive=False, folder=tmp_path))
        later.enter_context(device_lock("cpu", "worker three", is_exclusive=False, folder=tmp_path))
    warnings = [(line["event"], line["other"]) for line in logs]
    assert warnings == [("device_shared_by_workers", "worker one"), ("device_shared_by_workers", "worker two")]
