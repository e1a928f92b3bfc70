"""Post an event to a checked address (``guarded_http.py``)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

import httpx
import msgspec

from .guarded_http import ForbiddenAddressError, GuardedHTTP
from .settings import WebhookSettings

__all__ = ["ForbiddenAddressError", "Reply", "Sender"]

MAX_EXCERPT_CHARS = 200


class Reply(msgspec.Struct, frozen=True):
    """A response. ``excerpt`` is the start of its body, for people."""

    status: int
    excerpt: str


class Sender:
    """Posts events, any number concurrently."""

    def __init__(self, settings: WebhookSettings) -> None:
        self._settings = settings
        self._http = GuardedHTTP(
            settings.networks,
            connect_timeout_s=settings.timeout_s / 3,
            remedy="start 'penstock jobs' with --allow-private-webhooks and its network, then replay the event",
        )

    async def close(self) -> None:
        await self._http.close()

    async def post(self, url: str, headers: Mapping[str, str], body: str, *, tenant: str) -> Reply:
        """Send ``body`` of ``tenant`` and return the response, which may be a redirect or an error status.

        Raises:
            ForbiddenAddressError: an address of the host may not be called; nothing was sent.
            httpx.TransportError, OSError, TimeoutError: no response arrived.
        """
        async with asyncio.timeout(self._settings.timeout_s):
            response = await self._http.open("POST", url, headers, body.encode(), tenant=tenant)
            try:
                return Reply(response.status_code, await self._excerpt(response))
            finally:
                await response.aclose()

    async def _excerpt(self, response: httpx.Response) -> str:
        read = b""
        # Only the status matters, so a response that breaks off in its body counts.
        with contextlib.suppress(httpx.TransportError):
            # Raw, because decompressed data could become arbitrarily large.
            async for chunk in response.aiter_raw():
                read += chunk
                if len(read) >= self._settings.max_response_bytes:
                    break
        text = read[: 4 * MAX_EXCERPT_CHARS].decode(errors="replace")
        return "".join(char if char.isprintable() else " " for char in text)[:MAX_EXCERPT_CHARS].strip()
