"""Ray as the backend of a fleet. This is the only module that imports Ray.

Each engine has a separate placement group, because groups cannot change and an engine that stops must release its
resources. The group has a bundle for each host of the engine, on as many hosts (``--nnodes``). Engines of one host are
spread by requesting the host that has the fewest of them. A pending group makes Ray's autoscaler add a host.

Ray's calls block, so they run in threads.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import msgspec
import ray
import ray.exceptions
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...shared.errors import ConfigurationError
from .agent import HostAgent
from .backend import AgentGoneError, AgentPhase, AgentSpec, AgentStatus, AgentUnreachableError, Place, specs_of_hosts

NAMESPACE = "penstock"
# A call of ``status`` while a drain is in progress, and a second, shorter drain.
_MAX_CONCURRENCY = 4
_PLACED = "CREATED"

T = TypeVar("T")


class Bundle(Protocol):
    """Resources of one engine: bundle ``index`` of ``group`` on its first host, and the next ones on its others."""

    @property
    def group(self) -> PlacementGroup: ...

    @property
    def index(self) -> int: ...

    def release(self) -> None: ...


class Bundles(Protocol):
    """Source of bundles; ``most`` is their largest number, None if unknown."""

    @property
    def most(self) -> int | None: ...

    def allocate(self, resources: dict[str, float]) -> Bundle: ...


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to the cluster at ``address`` as a driver during the block; "auto" is the cluster of this host.

    The driver's actors and groups end with the driver, whatever ends it. Authentication by token is configured by the
    cluster and the environment (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH).

    Raises:
        ConfigurationError: the cluster is unreachable, or refuses this process.
    """
    # Send no usage statistics.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        # The agents' logs stay in Ray's files on their hosts.
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigurationError(
            f"--ray {address}: no Ray cluster can be used there: {lines[0]}; "
            "start one with `ray start --head`, and run this on one of its hosts"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def has_gpus() -> bool:
    """Return whether the cluster has GPUs at present."""
    return ray.cluster_resources().get("GPU", 0) > 0


class OwnGroups:
    """Bundles in a separate placement group for each engine.

    Args:
        num_hosts: number of hosts of an engine, and so of bundles of a group.
    """

    most = None

    def __init__(self, name: str, num_hosts: int) -> None:
        self._name = name
        self._num_hosts = num_hosts
        self._num_created = 0
        self._groups: list[_OwnGroup] = []

    def allocate(self, resources: dict[str, float]) -> Bundle:
        is_spread = self._num_hosts > 1
        group = placement_group(
            [resources] * self._num_hosts,
            strategy="STRICT_SPREAD" if is_spread else "STRICT_PACK",
            name=f"{self._name}-{self._num_created}",
            _soft_target_node_id=None if is_spread else self._emptiest_node(resources),
        )
        self._num_created += 1
        own_group = _OwnGroup(self, group)
        self._groups.append(own_group)
        return own_group

    def discard(self, group: _OwnGroup) -> None:
        self._groups.remove(group)

    def _emptiest_node(self, resources: dict[str, float]) -> str | None:
        """Return the node with the fewest of our groups among those with enough resources; None if there is none."""
        num_groups = Counter(node for group in self._groups for node in group.nodes())
        fitting = [
            node["NodeID"]
            for node in ray.nodes()
            if node["Alive"] and all(node["Resources"].get(kind, 0) >= needed for kind, needed in resources.items())
        ]
        return min(fitting, key=lambda node: (num_groups[node], node), default=None)


class _OwnGroup:
    index = 0

    def __init__(self, owner: OwnGroups, group: PlacementGroup) -> None:
        self._owner = owner
        self.group = group

    def nodes(self) -> list[str]:
        return [node for node in placement_group_table(self.group).get("bundles_to_node_id", {}).values() if node]

    def release(self) -> None:
        self._owner.discard(self)
        remove_placement_group(self.group)


class GivenGroup:
    """Bundles of an existing group, which its creator removes.

    Raises:
        ConfigurationError: our namespace has no group of that name, or no bundle of it fits an engine.
    """

    def __init__(self, name: str, resources: dict[str, float]) -> None:
        try:
            group = get_placement_group(name)
        except ValueError as error:
            raise ConfigurationError(
                f"--ray-placement-group {name}: Ray's namespace {NAMESPACE!r} has no such group; create it "
                f"after ray.init(namespace={NAMESPACE!r})"
            ) from error
        bundles = group.bundle_specs
        fitting = [i for i, has in enumerate(bundles) if all(has.get(k, 0) >= v for k, v in resources.items())]
        if not fitting:
            required = ", ".join(f"{kind} {number:g}" for kind, number in resources.items())
            raise ConfigurationError(f"--ray-placement-group {name}: none of its bundles {bundles} has {required}")
        self.group = group
        self.most: int | None = len(fitting)
        self.free = fitting

    def allocate(self, resources: dict[str, float]) -> Bundle:
        return _GivenBundle(self, self.free.pop(0))


class _GivenBundle:
    def __init__(self, owner: GivenGroup, index: int) -> None:
        self.group, self.index = owner.group, index
        self._owner = owner

    def release(self) -> None:
        self._owner.free.append(self.index)


class MeetingAgent(HostAgent):
    """Agent of one of several hosts of an engine.

    Args:
        meeting: encoded address and port at which the first host waits for the others; empty on the first host, which
            chooses them.
    """

    def __init__(self, spec: bytes, meeting: bytes = b"") -> None:
        self._meeting = meeting or _choose_meeting()
        address, port = msgspec.msgpack.decode(self._meeting, type=tuple[str, int])
        decoded = msgspec.msgpack.decode(spec, type=AgentSpec)
        options = {"PENSTOCK_MASTER_ADDR": address, "PENSTOCK_MASTER_PORT": str(port)}
        spec_here = msgspec.structs.replace(decoded, options={**decoded.options, **options})
        super().__init__(msgspec.msgpack.encode(spec_here))

    def meeting(self) -> bytes:
        """Return the argument for the agents of the other hosts."""
        return self._meeting


def _choose_meeting() -> bytes:
    """Return the address of this host in the cluster, and a port that is free at present."""
    address = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as probe:
        return msgspec.msgpack.encode((address, probe.getsockname()[1]))


class RayBackend:
    """Backend that places agents as actors.

    Args:
        resources: resources of an agent, by Ray's names "CPU" and "GPU".
        num_hosts: number of hosts of an engine, each with an agent.
    """

    def __init__(self, name: str, bundles: Bundles, resources: dict[str, float], num_hosts: int = 1) -> None:
        self.name = name
        self.most = bundles.most
        self._bundles = bundles
        self._resources = resources
        self._num_hosts = num_hosts
        # The class is pickled by reference, because hosts have this package installed.
        self._actor: Any = ray.remote(HostAgent if num_hosts == 1 else MeetingAgent)

    async def place(self, spec: bytes) -> Place:
        return await _in_thread(self._place, spec)

    def _place(self, spec: bytes) -> Place:
        bundle = self._bundles.allocate(self._resources)
        actors: list[Any] = []
        meeting: tuple[Any, ...] = ()
        for index, spec_of_host in enumerate(specs_of_hosts(spec, self._num_hosts), bundle.index):
            actors.append(self._options(bundle.group, index).remote(spec_of_host, *meeting))
            if self._num_hosts > 1 and not meeting:
                # Ray starts the others once the first one has answered.
                meeting = (actors[0].meeting.remote(),)
        return _RayPlace(actors, bundle)

    def _options(self, group: PlacementGroup, index: int) -> Any:
        return self._actor.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            ),
            num_cpus=self._resources.get("CPU", 0),
            num_gpus=self._resources.get("GPU", 0),
            # The agents of several hosts are replaced together, because the first host may be another one afterwards.
            max_restarts=-1 if self._num_hosts == 1 else 0,
            max_concurrency=_MAX_CONCURRENCY,
        )


class _RayPlace:
    """Actors of an engine in their bundles, that of its first host first."""

    def __init__(self, actors: list[Any], bundle: Bundle) -> None:
        self._actors = actors
        self._bundle: Bundle | None = bundle
        self._status_calls: list[asyncio.Future[bytes]] = []

    async def status(self, timeout_s: float) -> bytes:
        """Return the status of the first host, or of one that has ended."""
        # A call to a pending actor is pending too, so one call is enough.
        if not self._status_calls:
            self._status_calls = [asyncio.ensure_future(_answer(actor.status.remote())) for actor in self._actors]
        calls = self._status_calls
        _, pending = await asyncio.wait(calls, timeout=timeout_s)
        if not pending:
            self._status_calls = []
        # All are read, because asyncio logs those that are not.
        error = next(filter(None, [call.exception() for call in calls if call.done()]), None)
        if error is not None:
            raise error
        if pending:
            raise AgentUnreachableError(f"an agent has not answered within {timeout_s:g} s")
        statuses = [call.result() for call in calls]
        return next(filter(_has_ended, statuses), statuses[0])

    async def drain(self, drain_timeout_s: float, timeout_s: float) -> bytes:
        """Drain the first host; the others only run ranks for it."""
        try:
            async with asyncio.timeout(timeout_s):
                return await _answer(self._actors[0].drain.remote(drain_timeout_s))
        except TimeoutError:
            raise AgentUnreachableError(f"an agent has not drained within {timeout_s:g} s") from None

    async def is_pending(self) -> bool:
        bundle = self._bundle
        if bundle is None:
            return False
        table = await _in_thread(placement_group_table, bundle.group)
        return table.get("state") != _PLACED

    async def leave(self) -> None:
        bundle, self._bundle = self._bundle, None
        for call in self._status_calls:
            call.cancel()
        if bundle is not None:
            await _in_thread(self._release_bundle, bundle)

    def _release_bundle(self, bundle: Bundle) -> None:
        for actor in self._actors:
            ray.kill(actor)
        bundle.release()


def _has_ended(status: bytes) -> bool:
    return msgspec.msgpack.decode(status, type=AgentStatus).phase is AgentPhase.ENDED


async def _answer(reference: Any) -> bytes:
    try:
        return await reference
    except ray.exceptions.ActorDiedError as error:
        # Ray restarts actors for ever, unless their constructor failed or their engine has several hosts.
        raise AgentGoneError(f"an agent has died or could not be started: {_summary(error)}") from error
    except ray.exceptions.RayActorError as error:
        raise AgentUnreachableError(f"an agent is not running: {_summary(error)}") from error


async def _in_thread(call: Callable[..., T], *arguments: Any) -> T:
    try:
        return await asyncio.to_thread(call, *arguments)
    except ray.exceptions.RayError as error:
        raise AgentUnreachableError(f"Ray does not answer: {_summary(error)}") from error


def _summary(error: Exception) -> str:
    """Return the first line of an error of Ray, and its last, which has the reason."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
