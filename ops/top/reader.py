"""Reader of the page on the screen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from redis.exceptions import RedisError

from ...shared.errors import PenstockError
from ...shared.process.log import get_logger
from ..views.access import Access
from ..views.page import Page, View
from ..views.source import PageSnapshot, Source

# A read that takes longer than this is reported as unanswered.
SLOW_S = 2.0

log = get_logger(__name__)


class Reader:
    """The only reader of Redis in this process. After a failure the old values stay, with a reason."""

    def __init__(self, source: Source, access: Access) -> None:
        self._source = source
        self._access = access
        self._error = ""
        self._read_at: float | None = None
        self._pending_since: float | None = None

    async def read(self, page: Page, params: Mapping[str, str]) -> View | None:
        """Return the current values of a page; None if they cannot be read. ``staleness_reason`` then says why."""
        snapshot = PageSnapshot(self._source)
        # If another read cancels this one, the time since the last answer keeps counting.
        self._pending_since = self._pending_since or time.monotonic()
        try:
            view = await page.read(snapshot, params, self._access)
        except (PenstockError, RedisError) as error:
            self._error, self._pending_since = str(error), None
            return None
        except Exception as error:
            # In a thread, because formatting a traceback reads source files.
            await asyncio.to_thread(_log_error, page, error)
            self._error, self._pending_since = "this page cannot be shown; the file of --log-file has the reason", None
            return None
        finally:
            await snapshot.close()
        self._error, self._pending_since, self._read_at = "", None, snapshot.at
        return view

    async def models(self) -> list[str]:
        """Return the names of all models; [] if they cannot be read."""
        snapshot = PageSnapshot(self._source)
        try:
            return list(await snapshot.models())
        except (PenstockError, RedisError) as error:
            self._error = str(error)
            return []
        finally:
            await snapshot.close()

    def staleness_reason(self) -> str:
        """Return why and since when the values are stale; "" if they are current."""
        waited_s = time.monotonic() - self._pending_since if self._pending_since is not None else 0.0
        if self._error:
            reason = self._error
        elif waited_s > SLOW_S:
            reason = f"Redis has not answered for {waited_s:.0f} s"
        else:
            return ""
        return reason if self._read_at is None else f"values of {clock(self._read_at)}: {reason}"


def _log_error(page: Page, error: Exception) -> None:
    log.error("top_page_failed", page=page.name, exc_info=error)


def clock(at: float) -> str:
    """Return the time of day in UTC."""
    return time.strftime("%H:%M:%S UTC", time.gmtime(at))
