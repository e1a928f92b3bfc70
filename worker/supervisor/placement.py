"""Chooses the device of each engine, without torch because the supervisor must not touch a GPU."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...shared.process.command_line import UsageError

DEVICE_FOLDER = Path("/dev")
NVIDIA_SMI_TIMEOUT_S = 10.0


class Placement(msgspec.Struct, frozen=True):
    """Device of one engine; ``visible_devices`` is its CUDA_VISIBLE_DEVICES, None on the CPU."""

    device: str
    visible_devices: str | None = None

    def __str__(self) -> str:
        return self.device if self.visible_devices is None else f"{self.device}:{self.visible_devices}"


def place_engines(
    gpus: Sequence[int] | None,
    device: str | None,
    num_engines: int | None,
    gpus_per_engine: int = 1,
    source: str = "--gpus-per-engine",
) -> list[Placement]:
    """Return one placement per engine: the named GPUs, or all GPUs, or the CPU on a machine without any.

    Args:
        gpus: indices among the GPUs this process may use.
        device: "cpu" or "cuda"; None chooses GPUs if there are any.
        num_engines: number of engines on the CPU; GPUs get one engine per ``gpus_per_engine``.
        gpus_per_engine: number of consecutive GPUs of an engine of several ranks.
        source: options that ask for ``gpus_per_engine``, for error messages.

    Raises:
        UsageError: the arguments contradict each other or the machine.
    """
    option = "--device cuda" if gpus is None else f"--gpus {','.join(map(str, gpus))}"
    if gpus is not None and device == "cpu":
        raise UsageError(f"{option} contradicts --device cpu; give one of them")
    if device == "cpu":
        return [Placement("cpu")] * (num_engines or 1)
    present = usable_gpus()
    if gpus is None and device is None and not present:
        return [Placement("cpu")] * (num_engines or 1)
    if not present:
        raise UsageError(f"{option}: this machine has no NVIDIA GPU; use --device cpu")
    if num_engines is not None:
        raise UsageError(f"--engines {num_engines} is for --device cpu; there are as many engines as GPUs for them")
    indices = range(len(present)) if gpus is None else gpus
    for index in indices:
        if index >= len(present):
            count = "1 GPU, index 0" if len(present) == 1 else f"{len(present)} GPUs, 0 to {len(present) - 1}"
            raise UsageError(f"{option}: there is no GPU {index}; this machine has {count}")
    if len(indices) % gpus_per_engine:
        raise UsageError(
            f"{source}: {gpus_per_engine} for each engine does not divide the {len(indices)} GPUs; name others with "
            "--gpus"
        )
    groups = [indices[start : start + gpus_per_engine] for start in range(0, len(indices), gpus_per_engine)]
    return [Placement("cuda", ",".join(present[index] for index in group)) for group in groups]


def usable_gpus() -> list[str]:
    """Return, for each GPU that this process may use, its name in CUDA_VISIBLE_DEVICES.

    A scheduler such as Slurm assigns GPUs by setting that variable, so indices count within it.
    """
    num_present = _count_gpus()
    granted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if num_present == 0 or granted is None:
        return [str(index) for index in range(num_present)]
    names: list[str] = []
    for name in (part.strip() for part in granted.split(",")):
        # CUDA ignores everything after the first invalid entry; "-1" is the usual way to hide all.
        if not name or name == "-1":
            break
        names.append(name)
    return names


def _count_gpus() -> int:
    devices = [entry for entry in DEVICE_FOLDER.glob("nvidia*") if re.fullmatch(r"nvidia\d+", entry.name)]
    if devices:
        return len(devices)
    # Under WSL the driver has no device files.
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
