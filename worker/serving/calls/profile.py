"""The profile of the worker process, which is recorded together with the core's trace."""

from __future__ import annotations

from pathlib import Path

from ....shared.control.calls import UtilityAnswer
from ....shared.control.engine import ProfileSaved, StartProfile, StopProfile
from ....shared.process.code_profile import CodeProfile
from ..core.client import CoreClient

SUFFIX = ".worker.prof"


class WorkerProfile:
    """Has the core record its trace, and profiles this process meanwhile."""

    def __init__(self, core: CoreClient) -> None:
        self._core = core
        self._profile: CodeProfile | None = None

    async def start_both(self, call: StartProfile) -> UtilityAnswer:
        """Start the core's recording, then that of this process."""
        answer = await self._core.call(call)
        self._profile = CodeProfile()
        return answer

    async def stop_both(self, call: StopProfile) -> UtilityAnswer:
        """Write the core's trace, and the profile of this process next to it."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
        answer = await self._core.call(call)
        if profile is not None and isinstance(answer, ProfileSaved):
            trace = Path(answer.path)
            await profile.save(trace.with_name(trace.name.partition(".json")[0] + SUFFIX))
        return answer
