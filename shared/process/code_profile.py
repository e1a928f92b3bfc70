"""A profile of the functions that this thread runs."""

from __future__ import annotations

import asyncio
import cProfile
from pathlib import Path

from ..errors import EngineStateError


class CodeProfile:
    """Records the functions that this thread runs, those of its event loop included, until ``save``.

    The file is for ``pstats`` and viewers such as snakeviz. Calls take up to twice as long meanwhile.
    """

    def __init__(self) -> None:
        self._profile = cProfile.Profile()
        try:
            self._profile.enable()
        except ValueError as error:
            raise EngineStateError(f"this process has another profiler: {error}; stop it first") from error

    def stop(self) -> None:
        """Record no more. A second call does nothing."""
        self._profile.disable()

    async def save(self, path: Path) -> None:
        """Stop, and write the profile.

        Raises:
            EngineStateError: the file cannot be written.
        """
        self.stop()
        try:
            await asyncio.to_thread(self._profile.dump_stats, path)
        except OSError as error:
            raise EngineStateError(f"the profile cannot be written to {path}: {error.strerror}") from error
