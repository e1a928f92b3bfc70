"""The lock of a device: one worker of a host gives its memory to several models."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import structlog

from ...shared.errors import ConfigurationError
from ..processes.gpu import device_name
from .plan import SharedPlan

log = structlog.get_logger()


@contextmanager
def device_locks(plan: SharedPlan) -> Iterator[None]:
    """Hold the locks of all devices of a plan for the time of a ``with`` block.

    Raises:
        ConfigurationError: another worker has one of them; the message names both.
    """
    owner = f"worker {plan.worker_id} (pid {os.getpid()})"
    with ExitStack() as locks:
        for device in plan.devices:
            visible = device.placement.visible_devices
            locks.enter_context(device_lock(device_name(visible), owner, is_exclusive=visible is not None))
        yield


@contextmanager
def device_lock(device: str, owner: str, *, is_exclusive: bool, folder: Path | None = None) -> Iterator[None]:
    """Hold the lock of a device for the time of a ``with`` block. It ends with the process, however that ends.

    Args:
        device: name of the device on this host, the same for all workers.
        owner: words for the message to another worker.
        is_exclusive: whether another owner is an error, as on a GPU. On the CPU it is a warning.
        folder: folder of locks; None for the host's temporary folder.

    Raises:
        ConfigurationError: another worker has the device; the message names it.
    """
    path = (folder or Path(tempfile.gettempdir())) / f"penstock-device-{re.sub(r'[^A-Za-z0-9.-]', '_', device)}.lock"
    descriptor = _open_lock(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(descriptor, 200, 0).decode(errors="replace") or "another worker"
            if is_exclusive:
                raise ConfigurationError(
                    f"device {device} is kept by {other}, which shares it among several models; stop that worker, or "
                    "give another device with --gpus"
                ) from None
            log.warning("device_shared_by_workers", device=device, other=other)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner.encode(), 0)
        if not is_exclusive:
            # All that share the device hold the lock, so that the next one is warned whichever of them has ended. A
            # worker that has just begun may still hold it alone.
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        # Without O_CREAT first: Linux refuses that for another user's file in a sticky folder.
        return os.open(path, flags)
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o666)
        # Workers of other users use the device, too.
        os.fchmod(descriptor, 0o666)
        return descriptor
    except OSError as error:
        raise ConfigurationError(f"the lock of the device, {path}, cannot be opened: {error.strerror}") from error
