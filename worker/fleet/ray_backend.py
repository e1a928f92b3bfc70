"""Ray as the backend of a fleet. This is the only module that imports Ray.

Each engine has one bundle in a separate placement group, because groups cannot change and an engine that stops must
release its resources. A bundle is on one host, so the ranks of an engine are on one host. Replicas are spread by
requesting the host that has the fewest of them. A pending group makes Ray's autoscaler add a host.

Ray's calls block, so they run in threads.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

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
from .backend import AgentGoneError, AgentUnreachableError, Place

NAMESPACE = "penstock"
# A call of ``status`` while a drain is in progress, and a second, shorter drain.
_MAX_CONCURRENCY = 4
_PLACED = "CREATED"

T = TypeVar("T")


class Bundle(Protocol):
    """Resources of one agent."""

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
    """Bundles in a separate placement group for each agent."""

    most = None

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_created = 0
        self._groups: list[_OwnGroup] = []

    def allocate(self, resources: dict[str, float]) -> Bundle:
        group = placement_group(
            [resources],
            strategy="STRICT_PACK",
            name=f"{self._name}-{self._num_created}",
            _soft_target_node_id=self._emptiest_node(resources),
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


class RayBackend:
    """Backend that places agents as actors.

    Args:
        resources: resources of an agent, by Ray's names "CPU" and "GPU".
    """

    def __init__(self, name: str, bundles: Bundles, resources: dict[str, float]) -> None:
        self.name = name
        self.most = bundles.most
        self._bundles = bundles
        self._resources = resources
        # The class is pickled by reference, because hosts have this package installed.
        self._actor: Any = ray.remote(HostAgent)

    async def place(self, spec: bytes) -> Place:
        return await _in_thread(self._place, spec)

    def _place(self, spec: bytes) -> Place:
        bundle = self._bundles.allocate(self._resources)
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=bundle.group, placement_group_bundle_index=bundle.index
        )
        actor = self._actor.options(
            scheduling_strategy=strategy,
            num_cpus=self._resources.get("CPU", 0),
            num_gpus=self._resources.get("GPU", 0),
            max_restarts=-1,
            max_concurrency=_MAX_CONCURRENCY,
        )
        return _RayPlace(actor.remote(spec), bundle)


class _RayPlace:
    """Actor in its bundle."""

    def __init__(self, actor: Any, bundle: Bundle) -> None:
        self._actor = actor
        self._bundle: Bundle | None = bundle
        self._status_call: asyncio.Future[bytes] | None = None

    async def status(self, timeout_s: float) -> bytes:
        # A call to a pending actor is pending too, so one call is enough.
        if self._status_call is None:
            self._status_call = asyncio.ensure_future(_answer(self._actor.status.remote()))
        done, _ = await asyncio.wait([self._status_call], timeout=timeout_s)
        if not done:
            raise AgentUnreachableError(f"an agent has not answered within {timeout_s:g} s")
        call, self._status_call = self._status_call, None
        return call.result()

    async def drain(self, drain_timeout_s: float, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                return await _answer(self._actor.drain.remote(drain_timeout_s))
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
        if self._status_call is not None:
            self._status_call.cancel()
        if bundle is not None:
            await _in_thread(self._release_bundle, bundle)

    def _release_bundle(self, bundle: Bundle) -> None:
        ray.kill(self._actor)
        bundle.release()


async def _answer(reference: Any) -> bytes:
    try:
        return await reference
    except ray.exceptions.ActorDiedError as error:
        # Ray restarts actors for ever, unless their constructor failed.
        raise AgentGoneError(f"an agent could not be started: {_summary(error)}") from error
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
