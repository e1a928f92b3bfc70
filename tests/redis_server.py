"""A Redis that a test can stop, kill and start again with its saved data."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import redis

from penstock.shared.redis_access.embedded import find_redis_server
from penstock.shared.redis_access.rights import RedisVersion

from .processes import DEADLINE_S

# Deadline for steps that take no time on a quiet machine.


def acl_version() -> RedisVersion:
    """Return the form of ACL files that the server of the tests reads."""
    result = subprocess.run([str(find_redis_server()), "--version"], capture_output=True, text=True, check=True).stdout
    return RedisVersion.V6_2 if " v=6." in result else RedisVersion.V7


class RedisServer:
    """A redis-server with an append-only file, on a socket that outlives its process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._program = str(find_redis_server())
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{folder / 'redis.sock'}"

    @property
    def append_only_file(self) -> Path:
        # Redis 7 has a folder of such files.
        return next(self._folder.glob("appendonlydir/*.incr.aof"), self._folder / "appendonly.aof")

    def start(self, *options: str) -> None:
        """Start the server, or start it again with its saved data; does not wait for it. The last option counts."""
        command = [self._program, "--port", "0", "--unixsocket", str(self._folder / "redis.sock")]
        # fsync at every write: everything that a client has seen is on the disk, so that the engine's next append fits.
        command += ["--save", "", "--dir", str(self._folder), "--appendonly", "yes", "--appendfsync", "always"]
        self._process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)

    def start_loading(self) -> None:
        """Start the server again with more in its file than it can load before ``finish_loading``.

        It waits a moment at each command of its file, and answers between them that it is loading.
        """
        self._loaded = self.append_only_file
        self._num_loaded_bytes = self._loaded.stat().st_size
        with self._loaded.open("ab") as file:
            file.write(b"*2\r\n$6\r\nSELECT\r\n$1\r\n0\r\n" * 500_000)
        self.start("--key-load-delay", "100")

    def finish_loading(self) -> None:
        """Let the server find the end of its file. (While it loads, 6.2 takes no CONFIG SET.)"""
        os.truncate(self._loaded, self._num_loaded_bytes)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.AuthenticationError:
                    return  # it wants a password
                except redis.ConnectionError:
                    assert time.monotonic() < deadline, "redis-server does not answer"
                    time.sleep(0.01)

    def execute(self, *command: str | int) -> Any:
        with redis.Redis.from_url(self.url) as client:
            return client.execute_command(*command)

    def send(self, number: signal.Signals) -> None:
        """Send a signal; after SIGSTOP return once the server has stopped and runs no more commands."""
        assert self._process is not None
        self._process.send_signal(number)
        if number is signal.SIGSTOP:
            process, deadline = psutil.Process(self._process.pid), time.monotonic() + DEADLINE_S
            while process.status() != psutil.STATUS_STOPPED:
                assert time.monotonic() < deadline, "redis-server does not stop"

    def kill(self) -> None:
        """Kill it as a lost machine would be: nothing is written any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
