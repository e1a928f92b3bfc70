"""Base class of Redis deployments with several server processes on this machine."""

from __future__ import annotations

import secrets
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
from redis.exceptions import RedisError

from ....shared.errors import ConfigurationError
from ....shared.redis_access.embedded import find_redis_server
from ...local.life_line import LifeLine, unwind_on_sigterm

START_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.02
# Below the ephemeral ports, since a connection could take a port before its server does.
PORTS = range(22_000, 32_000)


class RedisProcesses(ABC):
    """Real processes, each on a port of its own of the loopback device, from ``start`` to ``stop`` or for a ``with``.

    Args:
        folder: where each gets a folder of its own, with its log.
        password: of all; none when empty.
    """

    # As errors call them all.
    name: str

    def __init__(self, folder: Path, password: str = "") -> None:
        self._folder = folder
        self._password = password
        self._program = str(find_redis_server())
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        # They end the processes if this one is killed.
        self._life_lines: dict[int, LifeLine] = {}

    @property
    @abstractmethod
    def url(self) -> str:
        """URL of the deployment."""

    @abstractmethod
    def start(self) -> None:
        """Start all, and wait until they serve.

        Raises:
            ConfigurationError: one does not start, or they do not find each other.
        """

    def __enter__(self) -> Self:
        unwind_on_sigterm()
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End all; doing it twice does nothing."""
        for port in list(self._processes):
            self.kill(port)
            del self._processes[port]

    def kill(self, port: int) -> None:
        """kill -9 of one; doing it twice does nothing."""
        if port in self._life_lines:
            # Before its process ends, since another process may get the id then.
            self._life_lines.pop(port).release()
        self._processes[port].kill()
        self._processes[port].wait()

    def client(self, port: int) -> redis.Redis:
        """Return a client of one, to be closed."""
        return redis.Redis(port=port, password=self._password or None)

    def do(self, port: int, *command: object) -> Any:
        """Run one command at one of them."""
        with closing(self.client(port)) as client:
            return client.execute_command(*command)

    def _folder_of(self, port: int) -> Path:
        folder = self._folder / str(port)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _spawn(self, port: int, *arguments: str) -> None:
        with (self._folder_of(port) / "log").open("ab") as log:
            self._processes[port] = subprocess.Popen(
                [self._program, *arguments], stdout=log, stderr=log, start_new_session=True
            )
        self._life_lines[port] = LifeLine(self._processes[port].pid)

    def _is_ours(self, port: int, connect: Callable[[int], redis.Redis] | None = None) -> bool:
        """Return whether our own process answers at a port; ``connect`` makes the client (by default ``client``)."""
        with suppress(RedisError), closing((connect or self.client)(port)) as client:
            info = text_of(client.execute_command("INFO", "server"))
            return f"process_id:{self._processes[port].pid}" in info.split()
        return False

    def _wait_until(self, condition: Callable[[], bool], what: str, port: int | None = None) -> None:
        """Wait for ``condition``, while the process at ``port`` lives.

        Raises:
            ConfigurationError: the condition does not become true in time; ``what`` describes it.
        """
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not condition():
            has_ended = port is not None and self._processes[port].poll() is not None
            if has_ended or time.monotonic() > give_up_at:
                raise ConfigurationError(f"{self.name}: {what}")
            time.sleep(POLL_INTERVAL_S)


def text_of(reply: object) -> str:
    """INFO as the server wrote it, whatever redis-py has made of it."""
    if isinstance(reply, dict):
        return "\n".join(f"{text_of(name)}:{text_of(value)}" for name, value in reply.items())
    return reply.decode() if isinstance(reply, bytes) else str(reply)


def free_port() -> int:
    """Return a port of the loopback device that is free, and that no connection gets meanwhile."""
    (port,) = free_ports(1)
    return port


def free_ports(count: int, among: range = PORTS, offset: int = 0) -> list[int]:
    """Return different free ports, whose ports at ``+ offset`` are free and different, too."""
    ports: list[int] = []
    used: set[int] = set()
    while len(ports) < count:
        port = secrets.choice(among)
        own = {port, port + offset}
        if not own & used and all(map(_is_free, own)):
            ports.append(port)
            used |= own
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False
