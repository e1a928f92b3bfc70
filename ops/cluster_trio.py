"""A Redis cluster of three primaries on this machine, for tests; each may be killed and started again."""

from __future__ import annotations

import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from ..shared.embedded import find_redis_server
from ..shared.errors import ConfigurationError

NUM_NODES = 3
NUM_SLOTS = 16384
NODE_TIMEOUT_MS = 2000
START_TIMEOUT_S = 60.0
START_TRIES = 5
POLL_INTERVAL_S = 0.02
# Nodes talk to each other at a port that is so much higher.
BUS_OFFSET = 10_000
# Below those that the system gives to connections.
PORTS = range(10_000, 22_000)


class ClusterTrio:
    """Real processes, each with a third of the slots, on the loopback device; ``stop`` ends them.

    Args:
        folder: where each gets a folder of its own.
        password: of all nodes; none when empty.
        is_kept: whether a node that is started again has what it had.
    """

    def __init__(self, folder: Path, password: str = "", *, is_kept: bool = False) -> None:
        self._folder = folder
        self._password = password
        self._is_kept = is_kept
        self._program = str(find_redis_server())
        self.ports: list[int] = []
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        user = f":{self._password}@" if self._password else ""
        return f"redis+cluster://{user}" + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def start(self) -> None:
        """Start all, give them their slots, and wait until each serves.

        Raises:
            ConfigurationError: one does not start, or they do not find each other.
        """
        for tries_left in reversed(range(START_TRIES)):
            self.ports = [_free_port() for _ in range(NUM_NODES)]
            try:
                self._begin()
                return
            except (ConfigurationError, RedisError):  # somebody was quicker to take a port
                self.stop()
                if not tries_left:
                    raise

    def _begin(self) -> None:
        for port in self.ports:
            self._spawn(port)
        self._wait(lambda: all(map(self._is_ours, self.ports)), "a node does not answer")
        for number, port in enumerate(self.ports):
            first, after = (place * NUM_SLOTS // NUM_NODES for place in (number, number + 1))
            self.do(port, "CLUSTER SET-CONFIG-EPOCH", number + 1)
            self.do(port, "CLUSTER ADDSLOTS", *range(first, after))
            if number:
                self.do(self.ports[0], "CLUSTER MEET", "127.0.0.1", port)
        self.wait_until_whole()

    def stop(self) -> None:
        """End all; doing it twice does nothing."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._processes.clear()

    def do(self, port: int, *command: object) -> object:
        """Run one command at a node."""
        with closing(redis.Redis(port=port, password=self._password or None)) as client:
            return client.execute_command(*command)

    def port_of(self, key: str) -> int:
        """Return the port of the node that serves a key."""
        slot = key_slot(key.encode())
        for first, last, primary, *_ in self.do(self.ports[0], "CLUSTER SLOTS"):  # type: ignore[attr-defined]
            if first <= slot <= last:
                return primary[1]
        raise ConfigurationError(f"no node has slot {slot}")

    def kill(self, port: int) -> None:
        """kill -9 of a node."""
        self._processes[port].send_signal(signal.SIGKILL)
        self._processes[port].wait()

    def revive(self, port: int) -> None:
        """Start a node again that was killed, with its slots, and its data if they are kept."""
        self._spawn(port)
        self.wait_until_whole()

    def hand_over(self, slot: int, to_port: int) -> None:
        """Let another node serve a slot, with whatever keys it has: all are told, and nothing is copied."""
        node_id = _text(self.do(to_port, "CLUSTER MYID"))
        others = [port for port in self.ports if port != to_port]
        # So its word counts for more than what others may have heard before.
        self.do(to_port, "CLUSTER SETSLOT", slot, "IMPORTING", _text(self.do(others[0], "CLUSTER MYID")))
        for port in (to_port, *others):
            self.do(port, "CLUSTER SETSLOT", slot, "NODE", node_id)

    def wait_until_whole(self) -> None:
        """Wait until each node says that all slots are served."""
        self._wait(lambda: all(map(self._is_content, self.ports)), "the nodes do not find each other")

    def _is_content(self, port: int) -> bool:
        with suppress(RedisError):
            return "cluster_state:ok" in _text(self.do(port, "CLUSTER INFO"))
        return False

    def _is_ours(self, port: int) -> bool:
        """Whether it is our own process that answers at a port."""
        with suppress(RedisError):
            return f"process_id:{self._processes[port].pid}" in _text(self.do(port, "INFO", "server")).split()
        return False

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not condition():
            if time.monotonic() > give_up_at or any(process.poll() is not None for process in self._processes.values()):
                raise ConfigurationError(f"Redis cluster: {what}")
            time.sleep(POLL_INTERVAL_S)

    def _spawn(self, port: int) -> None:
        folder = self._folder / str(port)
        folder.mkdir(parents=True, exist_ok=True)
        options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        options += ["--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT_MS)]
        if self._is_kept:
            options += ["--appendonly", "yes", "--appendfsync", "always"]
        if self._password:
            options += ["--requirepass", self._password, "--masterauth", self._password]
        with (folder / "log").open("ab") as log:
            self._processes[port] = subprocess.Popen(
                [self._program, *options], stdout=log, stderr=log, start_new_session=True
            )


def _text(reply: object) -> str:
    """INFO as the server wrote it, whatever redis-py has made of it."""
    if isinstance(reply, dict):
        return "\n".join(f"{_text(name)}:{_text(value)}" for name, value in reply.items())
    return reply.decode() if isinstance(reply, bytes) else str(reply)


def _free_port() -> int:
    """A port that is free, as is the one at which its node talks to others."""
    while True:
        port = secrets.choice(PORTS)
        with socket.socket() as probe, socket.socket() as bus, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + BUS_OFFSET))
            return port
