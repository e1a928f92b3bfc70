"""Receive the body of a request within a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Message, Receive

REQUEST_TIMEOUT_S = 30.0
# A body at this rate, 64 kbit/s, may take any time: uploads are long, and links may be slow.
MIN_BYTES_PER_S = 8 * 1024


class RequestBody:
    """An ASGI ``receive`` that waits ``timeout_s`` in total, and one more second for each 8 KiB received.

    Only time in which the application waits counts, not time in which it works and the network waits. After the end of
    the body, messages are passed on unchanged.

    Args:
        late: creates the exception for a late body from a reason about it.
    """

    def __init__(self, receive: Receive, timeout_s: float, late: Callable[[str], Exception]) -> None:
        self._receive = receive
        self._timeout_s = timeout_s
        self._late = late
        self._is_complete = False
        self.time_left_s = timeout_s
        self.is_late = False

    async def __call__(self) -> Message:
        """Return the next message.

        Raises:
            Exception: that of ``late``; the body did not arrive in time.
        """
        if self._is_complete:
            return await self._receive()
        loop = asyncio.get_running_loop()
        since = loop.time()
        try:
            async with asyncio.timeout(self.time_left_s):
                message = await self._receive()
        except TimeoutError:
            self.is_late = True
            reason = f"the body of the request was not complete after {self._timeout_s:g} s; send it at once"
            raise self._late(reason) from None
        self.time_left_s += len(message.get("body", b"")) / MIN_BYTES_PER_S - (loop.time() - since)
        self._is_complete = not message.get("more_body", False)
        return message
