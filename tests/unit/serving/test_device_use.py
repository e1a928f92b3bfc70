"""The use of a GPU in heartbeats. A stand-in has NVML's functions, since machines without a GPU have no driver."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from penstock.shared.deployment.records import DeviceUse
from penstock.worker.serving.reporting import device_use
from penstock.worker.serving.reporting.device_use import DeviceReader


class NVMLError(Exception):
    pass


def refuse(*_: Any) -> None:
    raise NVMLError("Not Supported")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("pynvml")
    for name, value in {
        "NVMLError": NVMLError,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=87),
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=45, total=139),
        "nvmlDeviceGetPowerUsage": lambda _: 450_000,
        "nvmlDeviceGetTemperature": lambda *_: 61,
    }.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(device_use, "find_spec", lambda _: module)
    return module


@pytest.mark.parametrize("device", ["cuda:0", "cuda:GPU-1234", "cuda:2,3", "cuda"])
def test_all_values_are_read(device: str, nvml: ModuleType) -> None:
    whole = DeviceUse(busy_share=0.87, used_bytes=45, total_bytes=139, power_w=450.0, temperature_c=61)
    assert DeviceReader(device).read() == whole


def test_a_value_that_the_device_does_not_report_is_none(nvml: Any) -> None:
    nvml.nvmlDeviceGetUtilizationRates = refuse
    use = DeviceReader("cuda:MIG-1").read()
    assert use is not None
    assert (use.busy_share, use.total_bytes) == (None, 139)


def test_a_cpu_and_a_driver_that_does_not_answer_have_no_use(nvml: Any) -> None:
    assert DeviceReader("cpu").read() is None
    nvml.nvmlInit = refuse
    reader = DeviceReader("cuda:0")
    assert (reader.read(), reader.read()) == (None, None)


def test_without_the_library_there_is_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_use, "find_spec", lambda _: None)
    assert DeviceReader("cuda:0").read() is None
