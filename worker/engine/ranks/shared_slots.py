"""Slots for adapters over several ranks, as used by rank 0."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ....shared.errors import AdapterFileError, UnsupportedAdapterError
from ...models.adapters.slots import AdapterSlots, Prepared
from .messages import (
    AskAdapter,
    AssignAdapter,
    DropAdapter,
    LoadAdapter,
    NotYet,
    RankFailed,
    ReleaseAdapters,
    RestoreAdapters,
)
from .team import FILES_TIMEOUT_S, RankTeam, words_of

# How often the ranks are asked whether they have read an adapter; each answers between two steps.
_POLL_S = 0.01


class SharedSlots(AdapterSlots):
    """The slots of all ranks, as used by rank 0."""

    def __init__(self, team: RankTeam, *args: Any) -> None:
        super().__init__(*args)
        self._team = team
        self._unsent: dict[int, str] = {}
        # Adapters that all ranks have.
        self._shared: set[str] = set()

    def share_adapter(self, folder: Path, digest: str) -> None:
        """Let the other ranks read their parts, while steps run. If one of them cannot, none keeps the adapter.

        Raises:
            AdapterFileError, UnsupportedAdapterError: the message names the rank and states its reason.
        """
        if digest in self._shared:
            return
        self._team.send(LoadAdapter(str(folder), digest))
        is_read = False
        while not is_read:
            time.sleep(_POLL_S)
            answers = self._team.gather(self._team.ask_ranks(AskAdapter(digest), FILES_TIMEOUT_S))
            for process, answer in zip(self._team.processes, answers, strict=True):
                if isinstance(answer, RankFailed):
                    self.drop_adapter(digest)
                    is_final = answer.code == UnsupportedAdapterError.code
                    raise (UnsupportedAdapterError if is_final else AdapterFileError)(words_of(process, answer))
            is_read = not any(isinstance(answer, NotYet) for answer in answers)
        self._shared.add(digest)

    def drop_adapter(self, digest: str) -> None:
        self._shared.discard(digest)
        self._team.send(DropAdapter(digest))

    def assign(self, slot: int, prepared: Prepared, digest: str = "") -> None:
        super().assign(slot, prepared, digest)
        self._unsent[slot] = digest

    def flush(self) -> None:
        # Sent here, not earlier, because a step that is still to be sent may use the slot's former adapter.
        while self._unsent:
            self._team.send(AssignAdapter(*self._unsent.popitem()))
        super().flush()

    def release(self, level: int) -> None:
        self._team.together(ReleaseAdapters(level), lambda: super(SharedSlots, self).release(level))

    def restore(self) -> None:
        self._team.together(RestoreAdapters(), super().restore)
