"""A job that is at an item of the agenda: under a lease, for a slice of time, and let go whatever happens.

A long job is run in slices, each an arq job of its own, so that no arq time-out has to be long: arq counts the jobs of
a dead process as running until the longest of them has passed, for an app's own functions in the same worker, too.
What a job does must survive kill -9 anyhow, so being cut after a slice costs it nothing but taking up the thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from ...shared.log import get_logger
from ..agenda import Hold

SLICE_S = 240.0

T = TypeVar("T")

log = get_logger(__name__)


class CutOffError(Exception):
    """The slice is over, or the hold was lost; the job is to be run again, here or elsewhere."""


async def run_held(hold: Hold, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` for a slice at most, while the hold lasts.

    Raises:
        CutOffError: it did not come to its end, and was cancelled.
    """
    body, keeping = asyncio.create_task(work), asyncio.create_task(hold.keep())
    try:
        await asyncio.wait({body, keeping}, timeout=SLICE_S, return_when=asyncio.FIRST_COMPLETED)
        if keeping.done() and not body.done():
            log.warning("job_hold_lost", item=hold.item, why="this process was stopped, or cut off, for too long")
    finally:
        body.cancel()
        keeping.cancel()
        await asyncio.gather(body, keeping, return_exceptions=True)
    if body.cancelled():
        raise CutOffError(hold.item)
    return body.result()
