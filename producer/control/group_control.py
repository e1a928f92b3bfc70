"""What a client may do with data-parallel groups: have them grow and shrink."""

from __future__ import annotations

import asyncio

from ...shared.deployment.groups.membership import resize_group
from ...shared.errors import EngineTimeoutError, ValidationError
from ...shared.messages.waves import GroupStanding
from ...shared.messages.worker_status import EngineState
from ...shared.values.shown import shown
from ...shared.values.timeouts import check_timeout
from ..client_core import ClientCore

SCALE_TIMEOUT_S = 300.0
MAX_RANKS = 1024
_LOOK_INTERVAL_S = 0.2
_SERVING = (EngineState.READY, EngineState.BUSY)


class GroupControl(ClientCore):
    """The part of the client that is about groups of engines which share the experts of a model."""

    async def scale_elastic_ep(
        self,
        new_data_parallel_size: int,
        drain_timeout: float = SCALE_TIMEOUT_S,
        *,
        model: str | None = None,
        group: str | None = None,
    ) -> list[GroupStanding]:
        """Have a group go on with another number of ranks; returns them, by rank, when all serve.

        All ranks stop at their next meeting, hand back what runs, and start again: each holds another part of the
        experts then. Requests wait meanwhile, and go on after their last token. Engines that are left over stand by.

        Args:
            new_data_parallel_size: at most as many as the group has engines, those that stand by included.
            drain_timeout: seconds in which the new ranks have to serve. They go on starting after it.
            group: may be left out where the model has one.

        Raises:
            ValidationError: an argument is wrong; nothing was done.
            UnknownModelError: no worker has ever served ``model`` here.
            GroupSizeError: the group cannot have so many ranks; nothing was done.
            EngineTimeoutError: they do not serve in time.
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
        async with self._operations.audit.audited("group.scale", group, model=name, size=size):
            await resize_group(self._commands, self._keys.model(name), group, size)
        former = {rank.generation for rank in before}
        try:
            async with asyncio.timeout(drain_timeout):
                return await self._until_whole(name, group, size, former)
        except TimeoutError:
            raise EngineTimeoutError(
                f"group {shown(group)} has not served with {size} ranks within {drain_timeout:g} s; worker list shows "
                "what its engines do"
            ) from None

    async def _until_whole(self, model: str, group: str, size: int, former: set[int]) -> list[GroupStanding]:
        """Look at heartbeats until all ranks of a later generation serve; returns them."""
        while True:
            ranks = await self._ranks(model, group)
            if _is_whole(ranks, size, former):
                return ranks
            await asyncio.sleep(_LOOK_INTERVAL_S)

    async def _group_of(self, model: str, group: str | None) -> str:
        """The group that is meant.

        Raises:
            ValidationError: the model has none of that name, or several.
        """
        beats = await self._health.engines(model)
        known = sorted({beat.group.group for beat in beats if beat.group is not None})
        if group is not None and group in known:
            return group
        if group is None and len(known) == 1:
            return known[0]
        told = ", ".join(known) or "none: its engines were not started with --data-parallel-size"
        raise ValidationError(f"group must be one of those of the model ({told}), got {shown(group)}")

    async def _ranks(self, model: str, group: str) -> list[GroupStanding]:
        """Those of a group that serve, by rank."""
        beats = await self._health.engines(model)
        found = [beat.group for beat in beats if beat.group is not None and beat.state in _SERVING]
        return sorted((one for one in found if one.group == group), key=lambda one: one.rank)


def _is_whole(ranks: list[GroupStanding], size: int, former: set[int]) -> bool:
    """Whether these are all ranks of a later generation."""
    generations = {rank.generation for rank in ranks}
    return [rank.rank for rank in ranks] == list(range(size)) and len(generations) == 1 and not generations & former
