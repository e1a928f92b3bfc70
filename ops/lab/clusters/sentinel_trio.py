"""A primary, two replicas and three Sentinels on this machine, whose primary can be killed."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import redis
from redis.exceptions import RedisError

from ....shared.connection import CommandConnection
from ....shared.errors import ConfigurationError
from ....shared.redis_access.embedded import find_redis_server
from .redis_processes import RedisProcesses, free_port, free_ports

NAME = "penstock"
NUM_SERVERS = NUM_SENTINELS = 3
# A failover takes about this and a second. Sentinels ping once a second, and first a second after they have turned to
# another primary: with 1000 they take one that has just been promoted for dead, though it lives.
DOWN_AFTER_MS = 3000
NUM_MEASURED = 5


class SentinelTrio(RedisProcesses):
    """The primary refuses writes that no replica could have got (``min-replicas-to-write 1``).

    Args:
        folder, password: as of ``RedisProcesses``; the password of Sentinels is ``sentinel-PASSWORD``.
    """

    name = "Redis with Sentinels"

    def __init__(self, folder: Path, password: str = "") -> None:
        super().__init__(folder, password)
        ports = free_ports(NUM_SERVERS + NUM_SENTINELS)
        self._ports, self._sentinel_ports = ports[:NUM_SERVERS], ports[NUM_SERVERS:]

    @property
    def url(self) -> str:
        """URL of the primary, through the Sentinels."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._sentinel_ports)
        if not self._password:
            return f"redis+sentinel://{hosts}/{NAME}"
        return f"redis+sentinel://:{self._password}@{hosts}/{NAME}?sentinel_password=sentinel-{self._password}"

    def start(self) -> None:
        first, *others = self._ports
        self._start_server(first)
        for port in others:
            self._start_server(port, first)
        for port in self._sentinel_ports:
            self._start_sentinel(port, first)
        self.wait_until_complete()

    def primary_port(self) -> int:
        """Return the port of the primary, by the word of the Sentinels."""
        for port in self._sentinel_ports:
            with suppress(RedisError), closing(self._sentinel(port)) as sentinel:
                _, port_text = sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)
                return int(port_text)
        raise ConfigurationError("no Sentinel answers")

    def kill_primary(self) -> int:
        """kill -9 of the primary; returns its port."""
        port = self.primary_port()
        self.kill(port)
        return port

    def await_failover(self, old_port: int) -> None:
        """Wait until another server than ``old_port`` is the primary."""
        self._wait_until(lambda: self.primary_port() != old_port, "there is no other primary")

    def revive(self, port: int) -> None:
        """Start a server again, as a replica of the one that is the primary now."""
        self._start_server(port, self.primary_port())

    def wait_until_complete(self) -> None:
        """Wait until the primary has two replicas that are in step, and every Sentinel knows of all others."""
        self._wait_until(
            lambda: all(map(self._is_complete, self._sentinel_ports)), "the Sentinels do not find each other"
        )
        self._wait_until(lambda: self._num_online_replicas() == NUM_SERVERS - 1, "the replicas are not in step")

    def _num_online_replicas(self) -> int:
        with suppress(RedisError), closing(self.client(self.primary_port())) as primary:
            replication: dict[str, Any] = primary.info("replication")  # type: ignore[assignment]  # redis-py says it may be awaited
            return sum(
                replication[f"slave{number}"]["state"] == "online" for number in range(replication["connected_slaves"])
            )
        return 0

    def _is_complete(self, port: int) -> bool:
        """Return whether a Sentinel knows all others, and no failover is in progress."""
        with suppress(RedisError, KeyError), closing(self._sentinel(port)) as sentinel:
            # By its own words: redis-py 6.4 fails at its own method for it.
            flat = sentinel.execute_command("SENTINEL", "MASTER", NAME)
            state = dict(zip(flat[::2], flat[1::2], strict=True))
            counts = (int(state[b"num-slaves"]), int(state[b"num-other-sentinels"]))
            return counts == (NUM_SERVERS - 1, NUM_SENTINELS - 1) and state[b"flags"] == b"master"
        return False

    def _sentinel(self, port: int) -> redis.Redis:
        return redis.Redis(port=port, password=f"sentinel-{self._password}" if self._password else None)

    def _start_server(self, port: int, primary_port: int | None = None) -> None:
        folder = self._folder_of(port)
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
        self._spawn(port, str(config), *options)
        self._wait_until(lambda: self._is_ours(port), "a server does not answer", port)

    def _start_sentinel(self, port: int, primary_port: int) -> None:
        folder = self._folder_of(port)
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
        self._spawn(port, str(config), "--sentinel")
        self._wait_until(lambda: self._is_ours(port, self._sentinel), "a Sentinel does not answer", port)


def has_sentinel_mode(folder: Path) -> bool:
    """Return whether the available server program can run as a Sentinel."""
    config = folder / "has-sentinel-mode.conf"
    config.write_text(f"port {free_port()}\nbind 127.0.0.1\n")
    process = subprocess.Popen([find_redis_server(), config, "--sentinel"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        return any(b"Sentinel ID" in line for line in process.stdout)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main() -> None:
    """Kill the primary a few times, and print how long each time the next write took."""
    with tempfile.TemporaryDirectory() as folder, SentinelTrio(Path(folder)) as trio:
        for _ in range(NUM_MEASURED):
            print(
                f"{asyncio.run(_measure_failover(trio)):.1f} s from kill -9 of the primary to the next answered write"
            )


async def _measure_failover(trio: SentinelTrio) -> float:
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
    await asyncio.to_thread(trio.wait_until_complete)
    return took_s


if __name__ == "__main__":
    main()
