"""Reads the page that is on the screen, and says when it cannot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from redis.exceptions import RedisError

from ...shared.errors import PenstockError
from ...shared.process.log import get_logger
from ..views.access import Access
from ..views.page import Page, View
from ..views.source import Moment, Source

# Redis is asked for longer than this before it is said that it does not answer.
SLOW_S = 2.0

log = get_logger(__name__)


class Reader:
    """The one reader of Redis in this process. What fails leaves the figures of before, and a sentence."""

    def __init__(self, source: Source, access: Access) -> None:
        self._source = source
        self._access = access
        self._error = ""
        self._read_at: float | None = None
        self._asked_at: float | None = None

    async def read(self, page: Page, params: Mapping[str, str]) -> View | None:
        """Return what a page shows now; None if that cannot be read, which ``trouble`` then explains."""
        moment = Moment(self._source)
        # A look that is cut short by another one leaves open since when there is no answer.
        self._asked_at = self._asked_at or time.monotonic()
        try:
            view = await page.read(moment, params, self._access)
        except (PenstockError, RedisError) as error:
            self._error, self._asked_at = str(error), None
            return None
        except Exception as error:
            # A traceback is written from the files of the program.
            await asyncio.to_thread(_note, page, error)
            self._error, self._asked_at = "this cannot be shown; --log-file says why", None
            return None
        finally:
            await moment.close()
        self._error, self._asked_at, self._read_at = "", None, moment.at
        return view

    async def models(self) -> list[str]:
        """Names of all models; [] if they cannot be read."""
        moment = Moment(self._source)
        try:
            return list(await moment.models())
        except (PenstockError, RedisError) as error:
            self._error = str(error)
            return []
        finally:
            await moment.close()

    def trouble(self) -> str:
        """Why the figures are old, and of when they are; "" while they are new."""
        waited_s = time.monotonic() - self._asked_at if self._asked_at is not None else 0.0
        if self._error:
            reason = self._error
        elif waited_s > SLOW_S:
            reason = f"Redis has not answered for {waited_s:.0f} s"
        else:
            return ""
        return reason if self._read_at is None else f"figures of {clock(self._read_at)}: {reason}"


def _note(page: Page, error: Exception) -> None:
    log.error("top_page_failed", page=page.name, exc_info=error)


def clock(at: float) -> str:
    """A time of day in UTC."""
    return time.strftime("%H:%M:%S UTC", time.gmtime(at))
