"""What an engine sets on its host: the number of threads, and the folder of compiled kernels."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import pytest

from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.setup import host as host_setup
from penstock.worker.engine.setup.host import store_triton_kernels

LARGE, SMALL = 135_000_000, 1_000_000


@pytest.mark.parametrize(
    ("cores", "num_engines", "num_parameters", "num_requested", "of_torch", "of_our_own"),
    [
        (2, 1, LARGE, 0, 1, 2),
        (16, 1, LARGE, 0, 15, 16),
        (16, 4, LARGE, 0, 3, 4),
        (2, 4, LARGE, 0, 1, 1),
        (16, 1, SMALL, 0, 1, 4),
        (2, 1, SMALL, 0, 1, 2),
        (2, 1, SMALL, 3, 3, 3),
    ],
)
def test_threads_of_torch_leave_a_core_to_others_and_our_own_need_not(
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    num_engines: int,
    num_parameters: int,
    num_requested: int,
    of_torch: int,
    of_our_own: int,
) -> None:
    monkeypatch.setattr(host_setup, "usable_cores", lambda: cores)
    config = EngineConfig(model="m", num_threads=num_requested, num_engines_on_host=num_engines)
    assert host_setup.choose_num_threads(config, num_parameters, is_native=False) == of_torch
    assert host_setup.choose_num_threads(config, num_parameters, is_native=True) == of_our_own


def test_the_ranks_of_an_engine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_setup, "usable_cores", lambda: 32)
    config = EngineConfig(model="m", num_engines_on_host=2, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert host_setup.choose_num_threads(config, LARGE, is_native=False) == 3


def test_torch_leaves_a_core_to_others_during_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(host_setup, "usable_cores", lambda: 2)
    monkeypatch.setattr(host_setup.torch, "set_num_threads", chosen.append)
    host_setup.set_loading_threads(EngineConfig(model="m"))
    host_setup.set_loading_threads(EngineConfig(model="m", num_threads=2))
    host_setup.set_loading_threads(EngineConfig(model="m", device="cuda"))
    assert chosen == [1, 2]


def test_triton_stores_kernels_in_the_cache_by_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/its/own")
    store_triton_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == "/its/own"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    store_triton_kernels()
    folder = tmp_path / "penstock" / "triton" / f"triton-{version('triton')}-torch-{version('torch')}"
    assert os.environ["TRITON_CACHE_DIR"] == str(folder)
