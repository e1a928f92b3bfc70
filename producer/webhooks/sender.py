"""One POST to an address that was checked: no redirects, no proxies, nothing waited for without limit.

The name is resolved here, once, every address of it is checked, and the connection goes to one of those: a name that
resolves to something else a moment later changes nothing. Certificate and ``Host`` are still the name's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Mapping

import httpx
import msgspec

from .addresses import Address
from .settings import WebhookSettings

MAX_EXCERPT_CHARS = 200


class ForbiddenAddressError(Exception):
    """The URL leads where this deployment may not call."""


class Reply(msgspec.Struct, frozen=True):
    """``excerpt`` is the beginning of what an answer says, for people."""

    status: int
    excerpt: str


class Sender:
    """Posts to webhooks, any number at a time."""

    def __init__(self, settings: WebhookSettings) -> None:
        self._settings = settings
        self._networks = settings.networks
        self._http = httpx.AsyncClient(
            # This alone looks at the environment: SSL_CERT_FILE may name a private authority.
            verify=httpx.create_ssl_context(),
            trust_env=False,
            follow_redirects=False,
            # The whole has a limit of its own; this one leaves time for other addresses.
            timeout=httpx.Timeout(None, connect=settings.timeout_s / 3),
            # A connection is its address's in httpx's eyes, and that of one name must not serve another.
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def post(self, url: str, headers: Mapping[str, str], body: str) -> Reply:
        """Send ``body`` and return what came back, a redirect or an error status included.

        Raises:
            ForbiddenAddressError: an address of the host may not be called; nothing was sent.
            httpx.TransportError, OSError, TimeoutError: there was no answer.
        """
        async with asyncio.timeout(self._settings.timeout_s):
            target = httpx.URL(url)
            addresses = await self._resolve(target)
            for number, address in enumerate(addresses, 1):
                try:
                    return await self._post_to(address, target, headers, body)
                except (httpx.ConnectError, httpx.ConnectTimeout):
                    if number == len(addresses):
                        raise
        raise AssertionError("a host has an address, or resolving it raises")

    async def _resolve(self, target: httpx.URL) -> list[Address]:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(target.host, target.port or 0, type=socket.SOCK_STREAM)
        addresses = [ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in found]
        for address in addresses:
            if not self._networks.permits(address):
                raise ForbiddenAddressError(
                    f"{target.host} leads to {address}, which is no public address; if it is meant, start "
                    "'penstock jobs' with --allow-private-webhooks and its network, then replay the event"
                )
        return addresses

    async def _post_to(self, address: Address, target: httpx.URL, headers: Mapping[str, str], body: str) -> Reply:
        request = self._http.build_request(
            "POST",
            target.copy_with(host=str(address)),
            headers={"Host": target.netloc.decode(), **headers},
            content=body.encode(),
            extensions={"sni_hostname": target.host},
        )
        response = await self._http.send(request, stream=True)
        try:
            return Reply(response.status_code, await self._excerpt(response))
        finally:
            await response.aclose()

    async def _excerpt(self, response: httpx.Response) -> str:
        read = b""
        # What comes after the status is of no weight: an answer that breaks off has been given.
        with contextlib.suppress(httpx.TransportError):
            # Raw: what is packed is not unpacked, however large it would become.
            async for chunk in response.aiter_raw():
                read += chunk
                if len(read) >= self._settings.max_response_bytes:
                    break
        text = read[: 4 * MAX_EXCERPT_CHARS].decode(errors="replace")
        return "".join(char if char.isprintable() else " " for char in text)[:MAX_EXCERPT_CHARS].strip()
