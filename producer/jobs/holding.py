"""Run a job that holds an item of the agenda: under a lease, and for a slice of time.

A long job runs in slices, each a separate arq job, so that arq's timeouts can be short. arq counts the jobs of a dead
process as running until the longest timeout has passed, including an app's own functions in the same worker. A job must
survive kill -9 anyway, so ending a slice costs only the restart.
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
    """The slice ended, or the hold was lost; the job must be run again, here or elsewhere."""


async def run_held(hold: Hold, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` for at most one slice, while the hold lasts.

    Raises:
        CutOffError: the work did not end, and was cancelled.
    """
    body, renewal = asyncio.create_task(work), asyncio.create_task(hold.keep())
    try:
        await asyncio.wait({body, renewal}, timeout=SLICE_S, return_when=asyncio.FIRST_COMPLETED)
        if renewal.done() and not body.done():
            log.warning("job_hold_lost", item=hold.item, why="this process was stopped or disconnected for too long")
    finally:
        body.cancel()
        renewal.cancel()
        await asyncio.gather(body, renewal, return_exceptions=True)
    if body.cancelled():
        raise CutOffError(hold.item)
    return body.result()
