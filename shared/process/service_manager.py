"""Notifications to a service manager: ready, stopping, and alive.

systemd's protocol: a datagram of lines to the socket in NOTIFY_SOCKET (``man sd_notify``). Without one nothing is sent,
so every process may call these. Children must not inherit the variable: ``environment_of_children`` leaves it out.

Source: systemd, "sd_notify(3)", "sd_watchdog_enabled(3)".
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_SOCKET, _WATCHDOG, _WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"


def tell_ready(status: str) -> None:
    """Report that this process serves. ``status`` is a phrase for people, without data of requests."""
    _notify(f"READY=1\nSTATUS={status}")


def tell_stopping() -> None:
    """Report that this process is stopping."""
    _notify("STOPPING=1")


@asynccontextmanager
async def watched() -> AsyncIterator[None]:
    """Report to the watchdog, if there is one, twice per interval that the event loop runs."""
    interval_s = _watchdog_interval_s()
    task = asyncio.create_task(_say_alive(interval_s / 2)) if interval_s else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


def environment_of_children() -> dict[str, str]:
    """Return this process's environment without the variables of its service manager."""
    return {name: value for name, value in os.environ.items() if name not in (_SOCKET, _WATCHDOG, _WATCHDOG_PID)}


def _watchdog_interval_s() -> float:
    """Return the interval; 0 without a watchdog, or if it watches another process."""
    if os.environ.get(_WATCHDOG_PID, str(os.getpid())) != str(os.getpid()):
        return 0.0
    with suppress(ValueError):
        return max(0, int(os.environ.get(_WATCHDOG, "0"))) / 1e6
    return 0.0


async def _say_alive(pause_s: float) -> None:
    while True:
        _notify("WATCHDOG=1")
        await asyncio.sleep(pause_s)


def _notify(lines: str) -> None:
    """Send a notification; an absent manager is no reason to end."""
    address = os.environ.get(_SOCKET, "")
    if not address:
        return
    # A leading @ stands for the null byte of an abstract socket.
    address = f"\0{address[1:]}" if address.startswith("@") else address
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setblocking(False)
        sender.connect(address)
        sender.send(lines.encode())
