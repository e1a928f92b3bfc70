"""A Ray cluster of several nodes on this machine, for tests and benchmarks, in a process controlled by lines of JSON.

    {"add": 4}                     adds a node with this many CPUs; replies with its number
    {"remove": 1, "kill": true}    removes that node, by SIGKILL or gracefully
    {"group": 2, "name": "mine"}   a placement group of this many bundles of one CPU, in the namespace `penstock`
    {"left": 0}                    replies with the numbers of live actors and of groups

The process ends with its input, and the cluster with it. Needs the extra `ray`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from ....shared.errors import ConfigurationError

OBJECT_STORE_BYTES = 80 << 20
END_TIMEOUT_S = 60.0


class RayCluster:
    """A running cluster, with a head node without resources.

    Args:
        log_path: file for Ray's output.

    Attributes:
        address: address of the head node.

    Raises:
        ConfigurationError: the cluster did not start, or has ended; its log has the reason.
    """

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        with log_path.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.ops.lab.clusters.ray_cluster"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.address = str(self._read_answer()["address"])

    def add(self, num_cpus: int) -> int:
        """Add a node, and return its number."""
        return int(self._ask_helper({"add": num_cpus})["node"])

    def remove(self, node: int, *, kill: bool = False) -> None:
        """Take a node away, in order or by kill -9."""
        self._ask_helper({"remove": node, "kill": kill})

    def make_group(self, name: str, num_bundles: int) -> None:
        """Make a placement group of bundles of one CPU each, which stays, in the namespace of fleets."""
        self._ask_helper({"group": num_bundles, "name": name})

    def left(self) -> dict[str, int]:
        """Return how many actors live, and how many placement groups there are."""
        return self._ask_helper({"left": 0})

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def _ask_helper(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read_answer()

    def _read_answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        # Skip lines that Ray prints itself.
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise ConfigurationError(f"the Ray cluster has ended; {self._log_path} says why")


def main() -> None:
    """Be that process."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # By default Ray gives actors a niceness of 15: beside other processes they get about a thirtieth of a processor.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - the name is Ray's
    from ray.cluster_utils import Cluster

    # Ray prints where it pleases; answers go where the answers were to go.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes: list[Any] = []
        answer(address=cluster.address)
        for line in sys.stdin:
            command = json.loads(line)
            if "add" in command:
                nodes.append(cluster.add_node(num_cpus=command["add"], object_store_memory=OBJECT_STORE_BYTES))
                answer(node=len(nodes) - 1)
            elif "remove" in command:
                cluster.remove_node(nodes[command["remove"]], allow_graceful=not command["kill"])
                answer()
            elif "group" in command:
                _make_group(cluster, command["name"], command["group"])
                answer()
            else:
                answer(**_left(cluster))
    finally:
        cluster.shutdown()


def _make_group(cluster: Any, name: str, num_bundles: int) -> None:
    import ray
    from ray.util.placement_group import placement_group

    ray.init(address=cluster.address, namespace="penstock", log_to_driver=False)
    try:
        group = placement_group([{"CPU": 1}] * num_bundles, name=name, lifetime="detached")
        ray.get(group.ready())
    finally:
        ray.shutdown()


def _left(cluster: Any) -> dict[str, int]:
    actors = cluster.global_state.actor_table(None).values()
    groups = cluster.global_state.placement_group_table().values()
    return {
        "actors": sum(actor["State"] != "DEAD" for actor in actors),
        "groups": sum(group["state"] != "REMOVED" for group in groups),
    }


if __name__ == "__main__":
    main()
