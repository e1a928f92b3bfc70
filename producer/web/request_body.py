"""The body of one request as it comes, which must come in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Message, Receive

REQUEST_TIMEOUT_S = 30.0
# What comes at this rate, 64 kbit/s, may come for as long as it likes: uploads are long, and lines are slow.
MIN_BYTES_PER_S = 8 * 1024


class RequestBody:
    """An ASGI ``receive`` that waits for ``timeout_s`` in all, and a second longer for each 8 KiB that has come.

    Only the time counts in which the application waits: not that in which it works and the network must wait. After
    the end of the body it passes on what it receives.

    Args:
        late: makes the exception for a body that is late, from a sentence that says so.
    """

    def __init__(self, receive: Receive, timeout_s: float, late: Callable[[str], Exception]) -> None:
        self._receive = receive
        self._timeout_s = timeout_s
        self._late = late
        self._is_whole = False
        self.patience_s = timeout_s
        self.is_late = False

    async def __call__(self) -> Message:
        """Return the next message.

        Raises:
            Exception: that of ``late``; the body did not come in time.
        """
        if self._is_whole:
            return await self._receive()
        loop = asyncio.get_running_loop()
        since = loop.time()
        try:
            async with asyncio.timeout(self.patience_s):
                message = await self._receive()
        except TimeoutError:
            self.is_late = True
            sentence = f"the body of the request was not complete after {self._timeout_s:g} s; send it at once"
            raise self._late(sentence) from None
        self.patience_s += len(message.get("body", b"")) / MIN_BYTES_PER_S - (loop.time() - since)
        self._is_whole = not message.get("more_body", False)
        return message
