"""The requests that an engine is running."""

from __future__ import annotations

import asyncio

from .generation import Generation


class RunningGenerations:
    """Running requests by request_id, and by the id that the engine core knows: request_id and epoch.

    The core's id includes the epoch because a request may return under a new claim while outputs of the old one are
    still in the pipe. They must not be mistaken for outputs of the new one.
    """

    def __init__(self) -> None:
        self._by_core_id: dict[str, Generation] = {}
        self._core_ids: dict[str, str] = {}
        # The few requests that had to run alone when they arrived.
        self._suspects: dict[str, Generation] = {}
        self.changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._by_core_id)

    @staticmethod
    def core_id(request_id: str, epoch: int) -> str:
        return f"{request_id}#{epoch}"

    def add(self, generation: Generation) -> str | None:
        """Add a generation, and drop an older claim of the same request. Returns the core id of that claim, if any."""
        older = self.remove(generation.request_id)
        core_id = self.core_id(generation.request_id, generation.epoch)
        self._by_core_id[core_id] = generation
        self._core_ids[generation.request_id] = core_id
        if generation.is_on_probation:
            self._suspects[core_id] = generation
        return older

    def num_kv_tokens(self, block_size: int) -> int:
        """Return how many tokens of the KV cache are reserved, in whole blocks."""
        return sum(-(-generation.num_kv_tokens // block_size) for generation in self._by_core_id.values()) * block_size

    @property
    def has_probationer(self) -> bool:
        """Whether a request runs that must be the only one."""
        return any(generation.is_on_probation for generation in self._suspects.values())

    def get(self, request_id: str) -> Generation | None:
        core_id = self._core_ids.get(request_id)
        return None if core_id is None else self._by_core_id[core_id]

    def by_core_id(self, core_id: str) -> Generation | None:
        return self._by_core_id.get(core_id)

    def remove(self, request_id: str) -> str | None:
        """Remove a request. Returns its core id; None for an unknown request."""
        core_id = self._core_ids.pop(request_id, None)
        if core_id is not None:
            generation = self._by_core_id.pop(core_id)
            self._suspects.pop(core_id, None)
            if generation.expiry is not None:
                generation.expiry.cancel()
            self.changed.set()
        return core_id

    def claims(self, partition: int = 0) -> list[tuple[str, int]]:
        """Return request_id and epoch of all requests that were claimed from a partition."""
        return [
            (generation.request_id, generation.epoch)
            for generation in self._by_core_id.values()
            if generation.partition == partition
        ]

    def core_ids(self) -> list[str]:
        return list(self._by_core_id)

    def all(self) -> list[Generation]:
        return list(self._by_core_id.values())

    async def until_none(self) -> None:
        """Wait until no request runs."""
        while self._by_core_id:
            self.changed.clear()
            await self.changed.wait()
