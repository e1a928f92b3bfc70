"""The client's methods for workers (draining, stopping, scaling) and for data-parallel groups (number of ranks)."""

from __future__ import annotations

import asyncio

from ...shared.deployment.audit import change_words
from ...shared.deployment.groups import resize_group
from ...shared.deployment.orders import MARGIN_S
from ...shared.errors import EngineTimeoutError, ValidationError
from ...shared.messages.core import GroupStatus
from ...shared.messages.supervision import EngineState
from ...shared.values.checks import check_timeout
from ...shared.values.shown import shown
from ..client_parts.core import ClientCore

DRAIN_TIMEOUT_S = 30.0
SCALE_TIMEOUT_S = 300.0
MAX_RANKS = 1024
_POLL_INTERVAL_S = 0.2
_SERVING = (EngineState.READY, EngineState.BUSY)


class WorkerControl(ClientCore):
    """The part of the client for workers. ``worker_id`` is as in ``engines`` and ``worker list``.

    All engines of a worker leave with it. Its requests resume at other engines, or wait for one.
    """

    async def drain_worker(self, worker_id: str, *, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Have a worker claim no more requests, finish the running ones and leave. Return once it has left.

        Args:
            timeout_s: after it the worker requeues the requests that still run; at most the worker's own
                ``--drain-timeout``.

        Raises:
            ValidationError: the worker does not exist, or ``timeout_s`` is invalid.
            PenstockError: the worker has not left 15 s after the timeout.
        """
        check_timeout("timeout_s", timeout_s)
        await self._operations.drain_worker(worker_id, timeout_s, timeout_s + MARGIN_S)

    async def stop_worker(self, worker_id: str) -> None:
        """Have a worker requeue its running requests and leave immediately. Return once it has left. Raises: as
        ``drain_worker``.
        """
        await self._operations.stop_worker(worker_id, MARGIN_S)

    async def scale_worker(self, worker_id: str, num_engines: int, *, timeout_s: float = SCALE_TIMEOUT_S) -> None:
        """Have a worker serve with ``num_engines`` engines. Return once it does.

        Surplus engines drain before they stop, for at most the worker's ``--drain-timeout``. The number holds for the
        run of the worker: one that is started again has the number of its command line.

        Args:
            timeout_s: raise an error after this time, though the worker continues to scale.

        Raises:
            ValidationError: the worker does not exist, it has not enough capacity, or ``timeout_s`` is invalid.
            PenstockError: the worker does not serve with that number in time; says what its engines do.
        """
        check_timeout("timeout_s", timeout_s)
        await self._operations.scale_worker(worker_id, num_engines, timeout_s)


class GroupControl(ClientCore):
    """The part of the client for groups of engines that share the experts of a model."""

    async def scale_elastic_ep(
        self,
        new_data_parallel_size: int,
        drain_timeout: float = SCALE_TIMEOUT_S,
        *,
        model: str | None = None,
        group: str | None = None,
    ) -> list[GroupStatus]:
        """Change the number of ranks of a group. Return its ranks in order once all of them serve.

        All ranks stop at their next synchronization, requeue running requests and start again, because each rank then
        holds another share of the experts. Requests wait meanwhile, and resume after their last token. Surplus engines
        stand by.

        Args:
            new_data_parallel_size: at most the number of engines of the group, including those that stand by.
            drain_timeout: seconds until the new ranks must serve. They continue to start after a timeout.
            group: may be left out if the model has one group.

        Raises:
            ValidationError: an argument is wrong; nothing was changed.
            UnknownModelError: no worker has ever served ``model`` here.
            GroupSizeError: the group cannot have that many ranks; nothing was changed.
            EngineTimeoutError: the ranks do not serve in time.
        """
        size = new_data_parallel_size
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_RANKS:
            raise ValidationError(
                f"new_data_parallel_size must be a whole number from 1 to {MAX_RANKS}, got {shown(size)}"
            )
        check_timeout("drain_timeout", drain_timeout)
        name = (await self._card(model)).model
        group = await self._group_of(name, group)
        before = await self._ranks(name, group)
        if len(before) == size == before[0].size:
            return before
        ranks = change_words(str(before[0].size), str(size)) if before else str(size)
        async with self._operations.audit.audited("group.scale", group, model=name, ranks=ranks):
            await resize_group(self._commands, self._keys.model(name), group, size)
        former = {rank.generation for rank in before}
        try:
            async with asyncio.timeout(drain_timeout):
                return await self._wait_for_all_ranks(name, group, size, former)
        except TimeoutError:
            raise EngineTimeoutError(
                f"group {shown(group)} has not served with {size} ranks within {drain_timeout:g} s; worker list shows "
                "what its engines do"
            ) from None

    async def _wait_for_all_ranks(self, model: str, group: str, size: int, former: set[int]) -> list[GroupStatus]:
        """Poll the heartbeats until all ranks of a later generation serve, and return the ranks."""
        while True:
            ranks = await self._ranks(model, group)
            if _are_all_ranks(ranks, size, former):
                return ranks
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def _group_of(self, model: str, group: str | None) -> str:
        """Return the group to act on.

        Raises:
            ValidationError: the model has no group of that name, or several groups and no name was passed.
        """
        heartbeats = await self._health.engines(model)
        groups = sorted({engine.group.group for engine in heartbeats if engine.group is not None})
        if group is not None and group in groups:
            return group
        if group is None and len(groups) == 1:
            return groups[0]
        names = ", ".join(groups) or "none: its engines were not started with --data-parallel-size"
        raise ValidationError(f"group must be one of the model's groups ({names}), got {shown(group)}")

    async def _ranks(self, model: str, group: str) -> list[GroupStatus]:
        """Return the serving ranks of a group, in order."""
        heartbeats = await self._health.engines(model)
        ranks = [engine.group for engine in heartbeats if engine.group is not None and engine.state in _SERVING]
        return sorted((rank for rank in ranks if rank.group == group), key=lambda rank: rank.rank)


def _are_all_ranks(ranks: list[GroupStatus], size: int, former: set[int]) -> bool:
    """Return whether ``ranks`` are all ranks of a later generation."""
    generations = {rank.generation for rank in ranks}
    return [rank.rank for rank in ranks] == list(range(size)) and len(generations) == 1 and not generations & former
