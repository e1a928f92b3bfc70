"""The KV cache of a core that was on standby, which it allocates when it takes over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ....shared.control.calls import Utility, UtilityAnswer
from ....shared.control.engine import KV_CACHE, WakeUp
from ....shared.errors import EngineCallError

# A GPU frees the memory of a killed process within about a second.
TIMEOUT_S = 10.0
_POLL_S = 0.05


async def allocate_cache(call: Callable[[Utility], Awaitable[UtilityAnswer]], timeout_s: float = TIMEOUT_S) -> None:
    """Let a core allocate its deferred KV cache, as soon as the memory of the dead process is free.

    Args:
        call: sends a call to the core and returns its answer.
        timeout_s: how long to wait for the memory.

    Raises:
        EngineCallError: the memory did not become free.
        EngineDeadError: the core has ended.
    """
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + timeout_s
    while True:
        try:
            await call(WakeUp([KV_CACHE]))
        except EngineCallError:
            if loop.time() >= give_up_at:
                raise
        else:
            return
        # No event tells that a driver has freed memory.
        await asyncio.sleep(_POLL_S)
