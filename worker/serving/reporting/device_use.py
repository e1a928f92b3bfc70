"""Use, memory, power and temperature of a GPU, from NVML, if nvidia-ml-py is installed (extra ``gpu``)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import structlog

from ....shared.deployment.records import DeviceUse

log = structlog.get_logger()


class DeviceReader:
    """Reader of the use of one device. Its calls take milliseconds, so they belong in a thread.

    Args:
        device: "cpu", or "cuda:" with an index or a UUID as in CUDA_VISIBLE_DEVICES; of several, the first is read.
    """

    def __init__(self, device: str) -> None:
        kind, _, names = device.partition(":")
        self._name = names.partition(",")[0] or "0"
        self._is_readable = kind == "cuda" and find_spec("pynvml") is not None
        self._nvml: Any = None
        self._handle: Any = None

    def read(self) -> DeviceUse | None:
        """Return the current use; None on a CPU, without the library, or if the driver does not answer."""
        if not self._is_readable:
            return None
        if self._nvml is None:
            self._nvml = importlib.import_module("pynvml")
        nvml = self._nvml
        try:
            if self._handle is None:
                nvml.nvmlInit()
                self._handle = (
                    nvml.nvmlDeviceGetHandleByIndex(int(self._name))
                    if self._name.isdecimal()
                    else nvml.nvmlDeviceGetHandleByUUID(self._name)
                )
        except nvml.NVMLError as error:
            log.warning("device_not_read", device=self._name, error=str(error))
            self._is_readable = False
            return None
        return DeviceUse(
            busy_share=self._value(lambda: nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100),
            used_bytes=self._value(lambda: int(nvml.nvmlDeviceGetMemoryInfo(self._handle).used)),
            total_bytes=self._value(lambda: int(nvml.nvmlDeviceGetMemoryInfo(self._handle).total)),
            power_w=self._value(lambda: nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000),
            temperature_c=self._value(
                lambda: int(nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU))
            ),
        )

    def _value(self, read_value: Callable[[], Any]) -> Any:
        """Return a value; None if the device does not report it, as a part of a GPU (MIG) does not."""
        try:
            return read_value()
        except self._nvml.NVMLError:
            return None
