"""Which device each engine gets, decided without torch: the supervisor must not touch a GPU."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...shared.command_line import UsageError

DEVICE_FOLDER = Path("/dev")
NVIDIA_SMI_TIMEOUT_S = 10.0


class Placement(msgspec.Struct, frozen=True):
    """Where one engine runs; ``visible_devices`` is its CUDA_VISIBLE_DEVICES, None on the CPU."""

    device: str
    visible_devices: str | None = None

    def __str__(self) -> str:
        return self.device if self.visible_devices is None else f"{self.device}:{self.visible_devices}"


def place_engines(
    gpus: Sequence[int] | None,
    device: str | None,
    num_engines: int | None,
    gpus_per_engine: int = 1,
    told_by: str = "--gpus-per-engine",
) -> list[Placement]:
    """Return one placement per engine: the GPUs asked for, or all GPUs, or the CPU where there is none.

    Args:
        gpus: indices among the GPUs this process may use.
        device: "cpu" or "cuda"; None takes what is there.
        num_engines: engines on the CPU; on GPUs there is one for each ``gpus_per_engine``.
        gpus_per_engine: GPUs that an engine of several ranks has, which follow each other.
        told_by: what asks for so many, for messages.

    Raises:
        UsageError: the arguments contradict each other or the machine.
    """
    asked_as = "--device cuda" if gpus is None else f"--gpus {','.join(map(str, gpus))}"
    if gpus is not None and device == "cpu":
        raise UsageError(f"{asked_as} contradicts --device cpu; give one of them")
    if device == "cpu":
        return [Placement("cpu")] * (num_engines or 1)
    present = usable_gpus()
    if gpus is None and device is None and not present:
        return [Placement("cpu")] * (num_engines or 1)
    if not present:
        raise UsageError(f"{asked_as}: this machine has no NVIDIA GPU; use --device cpu")
    if num_engines is not None:
        raise UsageError(f"--engines {num_engines} is for --device cpu; there are as many engines as GPUs for them")
    indices = range(len(present)) if gpus is None else gpus
    for index in indices:
        if index >= len(present):
            count = "1 GPU, index 0" if len(present) == 1 else f"{len(present)} GPUs, 0 to {len(present) - 1}"
            raise UsageError(f"{asked_as}: there is no GPU {index}; this machine has {count}")
    if len(indices) % gpus_per_engine:
        raise UsageError(
            f"{told_by}: {gpus_per_engine} for each engine does not divide the {len(indices)} GPUs; name others with "
            "--gpus"
        )
    groups = [indices[start : start + gpus_per_engine] for start in range(0, len(indices), gpus_per_engine)]
    return [Placement("cuda", ",".join(present[index] for index in group)) for group in groups]


def usable_gpus() -> list[str]:
    """Return, per GPU this process may use, the name that CUDA_VISIBLE_DEVICES takes for it.

    A scheduler such as Slurm hands out GPUs by setting that variable, so indices count within it.
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
