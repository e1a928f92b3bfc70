"""A primary, two replicas and three Sentinels on this machine, whose primary can be killed."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import redis
from redis.exceptions import RedisError

from ..shared.connection import CommandConnection
from ..shared.embedded import find_redis_server
from ..shared.errors import ConfigurationError

NAME = "penstock"
NUM_SERVERS = NUM_SENTINELS = 3
# A failover takes about this and a second. Sentinels ping once a second, and first a second after they have turned to
# another primary: with 1000 they take one that has just been promoted for dead, though it lives.
DOWN_AFTER_MS = 3000
START_TIMEOUT_S = 60.0
NUM_MEASURED = 5
POLL_INTERVAL_S = 0.05


class SentinelTrio:
    """Real processes, each on a port of its own of the loopback device; ``stop`` ends them.

    The primary refuses writes that no replica could have got (``min-replicas-to-write 1``).

    Args:
        folder: where each gets a folder of its own.
        password: of servers, and of Sentinels ``sentinel-PASSWORD``; none when empty.
    """

    def __init__(self, folder: Path, password: str = "") -> None:
        self._folder = folder
        self._password = password
        self._program = str(find_redis_server())
        self._ports = [_free_port() for _ in range(NUM_SERVERS)]
        self._sentinel_ports = [_free_port() for _ in range(NUM_SENTINELS)]
        self._servers: dict[int, subprocess.Popen[bytes]] = {}
        self._sentinels: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """Where the primary is, whichever it may be."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._sentinel_ports)
        if not self._password:
            return f"redis+sentinel://{hosts}/{NAME}"
        return f"redis+sentinel://:{self._password}@{hosts}/{NAME}?sentinel_password=sentinel-{self._password}"

    def start(self) -> None:
        """Start all, and wait until each Sentinel knows the replicas and the other Sentinels.

        Raises:
            ConfigurationError: one does not start.
        """
        first, *others = self._ports
        self._start_server(first)
        for port in others:
            self._start_server(port, first)
        for port in self._sentinel_ports:
            self._start_sentinel(port, first)
        self.wait_until_whole()

    def stop(self) -> None:
        """End all; doing it twice does nothing."""
        for process in (*self._sentinels, *self._servers.values()):
            process.kill()
            process.wait()

    def primary_port(self) -> int:
        """Return the port of the primary, by the word of the Sentinels."""
        for port in self._sentinel_ports:
            with suppress(RedisError), closing(self._sentinel(port)) as sentinel:
                _, found = sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)
                return int(found)
        raise ConfigurationError("no Sentinel answers")

    def kill_primary(self) -> int:
        """kill -9 of the primary; returns its port."""
        port = self.primary_port()
        self._servers[port].send_signal(signal.SIGKILL)
        self._servers[port].wait()
        return port

    def await_failover(self, old_port: int) -> None:
        """Wait until another server than ``old_port`` is the primary."""
        _until(lambda: self.primary_port() != old_port, "there is no other primary")

    def revive(self, port: int) -> None:
        """Start a server again, as a replica of the one that is the primary now."""
        self._start_server(port, self.primary_port())

    def wait_until_whole(self) -> None:
        """Wait until the primary has two replicas that are in step, and every Sentinel knows of all others."""
        _until(lambda: all(map(self._is_content, self._sentinel_ports)), "the Sentinels do not find each other")
        _until(lambda: self._num_online_replicas() == NUM_SERVERS - 1, "the replicas are not in step")

    def _num_online_replicas(self) -> int:
        with suppress(RedisError), closing(self._server(self.primary_port())) as primary:
            found: dict[str, Any] = primary.info("replication")  # type: ignore[assignment]  # redis-py says it may be awaited
            return sum(found[f"slave{number}"]["state"] == "online" for number in range(found["connected_slaves"]))
        return 0

    def _is_content(self, port: int) -> bool:
        """Whether a Sentinel knows all others, and is not in the middle of a failover."""
        with suppress(RedisError, KeyError), closing(self._sentinel(port)) as sentinel:
            # By its own words: redis-py 6.4 fails at its own method for it.
            flat = sentinel.execute_command("SENTINEL", "MASTER", NAME)
            state = dict(zip(flat[::2], flat[1::2], strict=True))
            counts = (int(state[b"num-slaves"]), int(state[b"num-other-sentinels"]))
            return counts == (NUM_SERVERS - 1, NUM_SENTINELS - 1) and state[b"flags"] == b"master"
        return False

    def _server(self, port: int) -> redis.Redis:
        return redis.Redis(port=port, password=self._password or None)

    def _sentinel(self, port: int) -> redis.Redis:
        return redis.Redis(port=port, password=f"sentinel-{self._password}" if self._password else None)

    def _start_server(self, port: int, primary_port: int | None = None) -> None:
        folder = self._folder / str(port)
        folder.mkdir(parents=True, exist_ok=True)
        options = [
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(folder),
            "--save",
            "",
            "--appendonly",
            "yes",
        ]
        options += ["--min-replicas-to-write", "1", "--repl-diskless-sync-delay", "0", "--repl-timeout", "5"]
        if self._password:
            options += ["--requirepass", self._password, "--masterauth", self._password]
        if primary_port is not None:
            options += ["--replicaof", "127.0.0.1", str(primary_port)]
        # Sentinels write into the configuration of servers.
        config = folder / "redis.conf"
        config.touch()
        self._servers[port] = self._spawn([str(config), *options], folder)
        _until(lambda: _answers(self._server(port)), "a server does not answer", self._servers[port])

    def _start_sentinel(self, port: int, primary_port: int) -> None:
        folder = self._folder / str(port)
        folder.mkdir(parents=True)
        config = folder / "sentinel.conf"
        lines = [
            f"port {port}",
            "bind 127.0.0.1",
            f"dir {folder}",
            f"sentinel monitor {NAME} 127.0.0.1 {primary_port} 2",
            f"sentinel down-after-milliseconds {NAME} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {NAME} 5000",
        ]
        if self._password:
            lines += [
                f"requirepass sentinel-{self._password}",
                f"sentinel sentinel-pass sentinel-{self._password}",
                f"sentinel auth-pass {NAME} {self._password}",
            ]
        config.write_text("\n".join(lines) + "\n")
        process = self._spawn([str(config), "--sentinel"], folder)
        self._sentinels.append(process)
        _until(lambda: _answers(self._sentinel(port)), "a Sentinel does not answer", process)

    def _spawn(self, arguments: list[str], folder: Path) -> subprocess.Popen[bytes]:
        with (folder / "log").open("ab") as log:
            return subprocess.Popen([self._program, *arguments], stdout=log, stderr=log, start_new_session=True)


def has_sentinel_mode(folder: Path) -> bool:
    """Whether the server program that would be used here can be a Sentinel."""
    config = folder / "has-sentinel-mode.conf"
    config.write_text(f"port {_free_port()}\nbind 127.0.0.1\n")
    process = subprocess.Popen([find_redis_server(), config, "--sentinel"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        return any(b"Sentinel ID" in line for line in process.stdout)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _answers(client: redis.Redis) -> bool:
    with suppress(RedisError), closing(client):
        return bool(client.ping())
    return False


def _until(condition: Callable[[], bool], what: str, process: subprocess.Popen[bytes] | None = None) -> None:
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > give_up_at or (process is not None and process.poll() is not None):
            raise ConfigurationError(f"Redis with Sentinels: {what}")
        time.sleep(POLL_INTERVAL_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    """Kill the primary a few times, and print how long each time the next write took."""
    with tempfile.TemporaryDirectory() as folder:
        trio = SentinelTrio(Path(folder))
        try:
            trio.start()
            for _ in range(NUM_MEASURED):
                print(f"{asyncio.run(_measure(trio)):.1f} s from kill -9 of the primary to the next answered write")
        finally:
            trio.stop()


async def _measure(trio: SentinelTrio) -> float:
    commands = CommandConnection(trio.url)
    try:
        await commands.execute("SET", "key", "before")
        old_port = await asyncio.to_thread(trio.kill_primary)
        killed_at = time.monotonic()
        await commands.execute("SET", "key", "after")
        took_s = time.monotonic() - killed_at
    finally:
        await commands.close()
    await asyncio.to_thread(trio.revive, old_port)
    await asyncio.to_thread(trio.wait_until_whole)
    return took_s


if __name__ == "__main__":
    main()
