"""The requests an engine is working on."""

from __future__ import annotations

import asyncio

from .generation import Generation


class RunningGenerations:
    """Found by request_id, or by the id the engine core knows: request_id and epoch.

    The epoch is in the core's id because a request may come back under a new claim while outputs of the old
    one are still in the pipe; they must not be taken for the new one's.
    """

    def __init__(self) -> None:
        self._by_core_id: dict[str, Generation] = {}
        self._core_ids: dict[str, str] = {}
        # That were to be alone when they came, which few are.
        self._suspects: dict[str, Generation] = {}
        self.changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._by_core_id)

    @staticmethod
    def core_id(request_id: str, epoch: int) -> str:
        return f"{request_id}#{epoch}"

    def add(self, generation: Generation) -> str | None:
        """Take up a generation; returns the core id of an older claim of the same request, which is dropped."""
        older = self.remove(generation.request_id)
        core_id = self.core_id(generation.request_id, generation.epoch)
        self._by_core_id[core_id] = generation
        self._core_ids[generation.request_id] = core_id
        if generation.is_on_probation:
            self._suspects[core_id] = generation
        return older

    def num_kv_tokens(self, block_size: int) -> int:
        """Tokens of the KV cache that are spoken for, in whole blocks."""
        return sum(-(-generation.num_kv_tokens // block_size) for generation in self._by_core_id.values()) * block_size

    @property
    def has_probationer(self) -> bool:
        """Whether a request is here that must be alone."""
        return any(generation.is_on_probation for generation in self._suspects.values())

    def get(self, request_id: str) -> Generation | None:
        core_id = self._core_ids.get(request_id)
        return None if core_id is None else self._by_core_id[core_id]

    def by_core_id(self, core_id: str) -> Generation | None:
        return self._by_core_id.get(core_id)

    def remove(self, request_id: str) -> str | None:
        """Drop a request; returns its core id, or None if it is not here (any more)."""
        core_id = self._core_ids.pop(request_id, None)
        if core_id is not None:
            generation = self._by_core_id.pop(core_id)
            self._suspects.pop(core_id, None)
            if generation.expiry is not None:
                generation.expiry.cancel()
            self.changed.set()
        return core_id

    def claims(self, partition: int = 0) -> list[tuple[str, int]]:
        """(request_id, epoch) of all that were claimed from a partition."""
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
        """Wait until there are none."""
        while self._by_core_id:
            self.changed.clear()
            await self.changed.wait()
