"""Ray as the ground of a fleet: all of this project that knows Ray.

An engine of one host has one bundle, in a placement group of its own: groups cannot change, and an engine that leaves
is to give its room back. A bundle is on one host as a whole, so ranks of an engine are packed; replicas are spread by
asking for the host that has the fewest of them. A group that waits is what makes Ray's autoscaler add a host.

Ray's calls block, and so are made in threads.
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
from .ground import AgentGoneError, AgentUnreachableError, Place

NAMESPACE = "penstock"
# A status while a drain waits, and a second drain in a greater hurry.
_MAX_CONCURRENCY = 4
_PLACED = "CREATED"

T = TypeVar("T")


class Bundle(Protocol):
    """Room for one agent."""

    @property
    def group(self) -> PlacementGroup: ...

    @property
    def index(self) -> int: ...

    def give_back(self) -> None: ...


class Bundles(Protocol):
    """Where room comes from; ``most``: how many, where that is known."""

    @property
    def most(self) -> int | None: ...

    def take(self, resources: dict[str, float]) -> Bundle: ...


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Be a driver of the cluster at ``address`` for as long as the block lasts; "auto": that of this host.

    Its actors and groups end with the driver, whatever ends that. Whether tokens authenticate is the cluster's and the
    environment's affair (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH).

    Raises:
        ConfigurationError: there is no cluster, or it does not let this process in.
    """
    # No figures of ours go to anybody.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        # Of the agents' logs Ray keeps files on their hosts.
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        told = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigurationError(
            f"--ray {address}: no Ray cluster can be used there: {told[0]}; "
            "start one with `ray start --head`, and run this on one of its hosts"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def has_gpus() -> bool:
    """Whether the cluster has any now."""
    return ray.cluster_resources().get("GPU", 0) > 0


class OwnGroups:
    """A placement group for each agent."""

    most = None

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_made = 0
        self._taken: list[_OwnGroup] = []

    def take(self, resources: dict[str, float]) -> Bundle:
        group = placement_group(
            [resources],
            strategy="STRICT_PACK",
            name=f"{self._name}-{self._num_made}",
            _soft_target_node_id=self._emptiest_node(resources),
        )
        self._num_made += 1
        taken = _OwnGroup(self, group)
        self._taken.append(taken)
        return taken

    def left(self, group: _OwnGroup) -> None:
        self._taken.remove(group)

    def _emptiest_node(self, resources: dict[str, float]) -> str | None:
        """The node with the fewest of ours, of those that could ever hold another; None if there is none."""
        ours = Counter(node for taken in self._taken for node in taken.nodes())
        fitting = [
            node["NodeID"]
            for node in ray.nodes()
            if node["Alive"] and all(node["Resources"].get(kind, 0) >= needed for kind, needed in resources.items())
        ]
        return min(fitting, key=lambda node: (ours[node], node), default=None)


class _OwnGroup:
    index = 0

    def __init__(self, owner: OwnGroups, group: PlacementGroup) -> None:
        self._owner = owner
        self.group = group

    def nodes(self) -> list[str]:
        return [node for node in placement_group_table(self.group).get("bundles_to_node_id", {}).values() if node]

    def give_back(self) -> None:
        self._owner.left(self)
        remove_placement_group(self.group)


class GivenGroup:
    """The bundles of a group that somebody else has made, and will remove.

    Raises:
        ConfigurationError: there is none of that name in our namespace, or no bundle of it has room for an engine.
    """

    def __init__(self, name: str, resources: dict[str, float]) -> None:
        try:
            group = get_placement_group(name)
        except ValueError as error:
            raise ConfigurationError(
                f"--ray-placement-group {name}: there is no such group in Ray's namespace {NAMESPACE!r}; make it "
                f"after ray.init(namespace={NAMESPACE!r})"
            ) from error
        bundles = group.bundle_specs
        fitting = [i for i, has in enumerate(bundles) if all(has.get(k, 0) >= v for k, v in resources.items())]
        if not fitting:
            wanted = ", ".join(f"{kind} {number:g}" for kind, number in resources.items())
            raise ConfigurationError(f"--ray-placement-group {name}: none of its bundles {bundles} has {wanted}")
        self.group = group
        self.most: int | None = len(fitting)
        self.free = fitting

    def take(self, resources: dict[str, float]) -> Bundle:
        return _GivenBundle(self, self.free.pop(0))


class _GivenBundle:
    def __init__(self, owner: GivenGroup, index: int) -> None:
        self.group, self.index = owner.group, index
        self._owner = owner

    def give_back(self) -> None:
        self._owner.free.append(self.index)


class RayGround:
    """Places agents as actors.

    Args:
        resources: of an agent, by Ray's names: "CPU", "GPU".
    """

    def __init__(self, name: str, bundles: Bundles, resources: dict[str, float]) -> None:
        self.name = name
        self.most = bundles.most
        self._bundles = bundles
        self._resources = resources
        # By reference: hosts have this package installed, and no code of ours is pickled.
        self._actor: Any = ray.remote(HostAgent)

    async def place(self, spec: bytes) -> Place:
        return await _in_thread(self._place, spec)

    def _place(self, spec: bytes) -> Place:
        bundle = self._bundles.take(self._resources)
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
    """One actor in its bundle."""

    def __init__(self, actor: Any, bundle: Bundle) -> None:
        self._actor = actor
        self._bundle: Bundle | None = bundle
        self._asked: asyncio.Future[bytes] | None = None

    async def status(self, timeout_s: float) -> bytes:
        # A call to an actor that waits for its room waits with it: one of them is enough.
        if self._asked is None:
            self._asked = asyncio.ensure_future(_answer(self._actor.status.remote()))
        done, _ = await asyncio.wait([self._asked], timeout=timeout_s)
        if not done:
            raise AgentUnreachableError(f"an agent has not answered within {timeout_s:g} s")
        asked, self._asked = self._asked, None
        return asked.result()

    async def drain(self, drain_timeout_s: float, timeout_s: float) -> bytes:
        try:
            async with asyncio.timeout(timeout_s):
                return await _answer(self._actor.drain.remote(drain_timeout_s))
        except TimeoutError:
            raise AgentUnreachableError(f"an agent has not drained within {timeout_s:g} s") from None

    async def waits_for_room(self) -> bool:
        bundle = self._bundle
        if bundle is None:
            return False
        table = await _in_thread(placement_group_table, bundle.group)
        return table.get("state") != _PLACED

    async def leave(self) -> None:
        bundle, self._bundle = self._bundle, None
        if self._asked is not None:
            self._asked.cancel()
        if bundle is not None:
            await _in_thread(self._leave, bundle)

    def _leave(self, bundle: Bundle) -> None:
        ray.kill(self._actor)
        bundle.give_back()


async def _answer(reference: Any) -> bytes:
    try:
        return await reference
    except ray.exceptions.ActorDiedError as error:
        # Others are started anew for ever: this one could not be made.
        raise AgentGoneError(f"an agent could not be started: {_told(error)}") from error
    except ray.exceptions.RayActorError as error:
        raise AgentUnreachableError(f"an agent is not there: {_told(error)}") from error


async def _in_thread(call: Callable[..., T], *arguments: Any) -> T:
    try:
        return await asyncio.to_thread(call, *arguments)
    except ray.exceptions.RayError as error:
        raise AgentUnreachableError(f"Ray does not answer: {_told(error)}") from error


def _told(error: Exception) -> str:
    """What Ray says in many lines: the first, and the last, where the reason is."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
