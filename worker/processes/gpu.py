"""What the driver of a GPU reports, without a context on the device."""

from __future__ import annotations

import asyncio
import subprocess

from ...shared.errors import ConfigurationError

_SMI = ("nvidia-smi", "--format=csv,noheader,nounits")
_SMI_TIMEOUT_S = 10.0
# Time for memory that processes gave back to be free.
FREE_TIMEOUT_S = 5.0
_FREE_POLL_S = 0.1


def free_device_bytes(visible_devices: str) -> int:
    """Return the free bytes of a GPU, as its driver reports them.

    Raises:
        ConfigurationError: the driver's program does not answer.
    """
    return int(_ask_driver("memory.free", visible_devices)) << 20


def device_name(visible_devices: str | None) -> str:
    """Return a name of the device that is the same for all processes of this host."""
    return "cpu" if visible_devices is None else _ask_driver("uuid", visible_devices)


def _ask_driver(field: str, visible_devices: str) -> str:
    command = [*_SMI, f"--query-gpu={field}", f"--id={visible_devices}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(f"nvidia-smi does not report {field} of GPU {visible_devices}: {error}") from error
    return result.stdout.strip()


async def until_free(visible_devices: str | None, num_bytes: int) -> None:
    """Wait until a GPU has this much free memory; ``FREE_TIMEOUT_S`` at most, since a load may succeed with less.

    The CPU gives memory back when a process ends or frees it, so nothing is to be waited for.
    """
    if visible_devices is None:
        return
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + FREE_TIMEOUT_S
    # No event tells that a driver has freed memory.
    while loop.time() < give_up_at and await asyncio.to_thread(free_device_bytes, visible_devices) < num_bytes:  # noqa: ASYNC110
        await asyncio.sleep(_FREE_POLL_S)
