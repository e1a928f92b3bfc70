"""A Redis cluster of three primaries on this machine, for tests; each may be killed and started again."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

from redis.crc import key_slot
from redis.exceptions import RedisError

from ....shared.errors import ConfigurationError
from .redis_processes import RedisProcesses, free_ports, text_of

NUM_NODES = 3
NUM_SLOTS = 16384
# Long, because a node on a busy machine may be slow to respond.
NODE_TIMEOUT_MS = 10_000
START_TRIES = 5
# Nodes talk to each other at a port that is so much higher.
BUS_OFFSET = 10_000
# Below the ephemeral ports.
PORTS = range(10_000, 22_000)


class ClusterTrio(RedisProcesses):
    """Three nodes, each with a third of the slots.

    Args:
        folder, password: as of ``RedisProcesses``.
        is_kept: whether a restarted node has its data.
    """

    name = "Redis cluster"

    def __init__(self, folder: Path, password: str = "", *, is_kept: bool = False) -> None:
        super().__init__(folder, password)
        self._is_kept = is_kept
        self.ports: list[int] = []

    @property
    def url(self) -> str:
        user = f":{self._password}@" if self._password else ""
        return f"redis+cluster://{user}" + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def start(self) -> None:
        for tries_left in reversed(range(START_TRIES)):
            self.ports = free_ports(NUM_NODES, PORTS, BUS_OFFSET)
            try:
                self._begin_nodes()
                return
            except (ConfigurationError, RedisError):  # another process took a port first
                self.stop()
                if not tries_left:
                    raise

    def _begin_nodes(self) -> None:
        for port in self.ports:
            self._start_node(port)
        for port in self.ports:
            self._wait_until(partial(self._is_ours, port), "a node does not answer", port)
        for number, port in enumerate(self.ports):
            first, after = (place * NUM_SLOTS // NUM_NODES for place in (number, number + 1))
            self.do(port, "CLUSTER SET-CONFIG-EPOCH", number + 1)
            self.do(port, "CLUSTER ADDSLOTS", *range(first, after))
            if number:
                self.do(self.ports[0], "CLUSTER MEET", "127.0.0.1", port)
        self.wait_until_all_slots_served()

    def port_of(self, key: str) -> int:
        """Return the port of the node that serves a key."""
        slot = key_slot(key.encode())
        for first, last, primary, *_ in self.do(self.ports[0], "CLUSTER SLOTS"):
            if first <= slot <= last:
                return primary[1]
        raise ConfigurationError(f"no node has slot {slot}")

    def revive(self, port: int) -> None:
        """Start a node again that was killed, with its slots, and its data if they are kept."""
        self._start_node(port)
        self.wait_until_all_slots_served()

    def hand_over(self, slot: int, to_port: int) -> None:
        """Assign a slot to another node with the keys that it has. All nodes learn of it; nothing is copied."""
        node_id = text_of(self.do(to_port, "CLUSTER MYID"))
        others = [port for port in self.ports if port != to_port]
        # Importing raises the node's configuration epoch, so that its claim wins.
        self.do(to_port, "CLUSTER SETSLOT", slot, "IMPORTING", text_of(self.do(others[0], "CLUSTER MYID")))
        for port in (to_port, *others):
            self.do(port, "CLUSTER SETSLOT", slot, "NODE", node_id)

    def wait_until_all_slots_served(self) -> None:
        """Wait until each node reports that all slots are served."""
        self._wait_until(lambda: all(map(self._is_complete, self.ports)), "the nodes do not find each other")

    def _is_complete(self, port: int) -> bool:
        with suppress(RedisError):
            return "cluster_state:ok" in text_of(self.do(port, "CLUSTER INFO"))
        return False

    def _start_node(self, port: int) -> None:
        folder = self._folder_of(port)
        options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        options += ["--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT_MS)]
        if self._is_kept:
            options += ["--appendonly", "yes", "--appendfsync", "always"]
        if self._password:
            options += ["--requirepass", self._password, "--masterauth", self._password]
        self._spawn(port, *options)
