"""Which device each engine gets, with device files of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.shared.process.command_line import UsageError
from penstock.worker.supervisor import Placement, place_engines


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty /dev and PATH: a machine without a GPU until a test adds one."""
    monkeypatch.setattr("penstock.worker.supervisor.placement.DEVICE_FOLDER", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def add_gpus(devices: Path, count: int) -> None:
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(count))):
        (devices / name).touch()


def cuda(*names: str) -> list[Placement]:
    return [Placement("cuda", name) for name in names]


def test_without_a_gpu_the_cpu_is_taken(devices: Path) -> None:
    assert place_engines(None, None, None) == [Placement("cpu")]
    assert place_engines(None, None, 2) == [Placement("cpu")] * 2
    assert place_engines(None, "cpu", 3) == [Placement("cpu")] * 3


@pytest.mark.parametrize(("gpus", "device"), [((0, 1), None), (None, "cuda")])
def test_gpus_on_a_machine_without(devices: Path, gpus: tuple[int, ...] | None, device: str | None) -> None:
    with pytest.raises(UsageError, match="this machine has no NVIDIA GPU; use --device cpu"):
        place_engines(gpus, device, None)


def test_gpus_are_taken_where_there_are_some(devices: Path) -> None:
    add_gpus(devices, 3)
    assert place_engines(None, None, None) == cuda("0", "1", "2")
    assert place_engines(None, "cuda", None) == cuda("0", "1", "2")
    assert place_engines((2, 0), None, None) == cuda("2", "0")
    assert place_engines(None, "cpu", None) == [Placement("cpu")]


def test_an_engine_of_several_ranks_has_several_gpus(devices: Path) -> None:
    add_gpus(devices, 4)
    assert place_engines(None, None, None, 2) == cuda("0,1", "2,3")
    assert place_engines((3, 1), None, None, 2) == cuda("3,1")
    with pytest.raises(UsageError, match="--tensor-parallel-size 3: 3 for each engine does not divide the 4 GPUs"):
        place_engines(None, None, None, 3, "--tensor-parallel-size 3")


@pytest.mark.parametrize(
    ("gpus", "device", "num_engines", "sentence"),
    [
        ((0, 2), None, None, "there is no GPU 2; this machine has 2 GPUs, 0 to 1"),
        ((0,), "cpu", None, "--gpus 0 contradicts --device cpu"),
        ((0,), None, 2, "there are as many engines as GPUs for them"),
    ],
)
def test_wrong_arguments(
    devices: Path, gpus: tuple[int, ...] | None, device: str | None, num_engines: int | None, sentence: str
) -> None:
    add_gpus(devices, 2)
    with pytest.raises(UsageError, match=sentence):
        place_engines(gpus, device, num_engines)


def test_indices_count_among_the_gpus_granted(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_gpus(devices, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-1234,-1,0")
    assert place_engines(None, None, None) == cuda("3", "GPU-1234")
    assert place_engines((1,), None, None) == cuda("GPU-1234")
    with pytest.raises(UsageError, match="no GPU 2; this machine has 2 GPUs"):
        place_engines((2,), None, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert place_engines(None, None, None) == [Placement("cpu")]


def test_driver_without_device_files(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = devices / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-2)'\n")
    program.chmod(0o755)
    assert place_engines(None, None, None) == cuda("0", "1")


def test_a_placement_is_printed_as_its_device() -> None:
    assert [str(placement) for placement in (Placement("cpu"), *cuda("1"))] == ["cpu", "cuda:1"]
