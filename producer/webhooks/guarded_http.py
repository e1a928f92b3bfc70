"""HTTP calls to addresses that were checked: no redirects, no proxies, nothing waited for without limit.

The name is resolved here, once, every address of it is checked, and the connection goes to one of those: a name that
resolves to something else a moment later changes nothing. Certificate and ``Host`` are still the name's.
"""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from .addresses import Address, Networks
from .resolver import Resolver


class ForbiddenAddressError(Exception):
    """The URL leads where this deployment may not call."""


class GuardedHTTP:
    """Calls URLs that others have named, any number at a time.

    Args:
        networks: the addresses that may be called.
        connect_timeout_s: to look up a name, and to connect to one address of it.
        remedy: what to do where an address that is forbidden is meant, to end the sentence that forbids it.
    """

    def __init__(self, networks: Networks, *, connect_timeout_s: float, remedy: str) -> None:
        self._networks = networks
        self._remedy = remedy
        self._resolver = Resolver(connect_timeout_s)
        self._http = httpx.AsyncClient(
            # This alone looks at the environment: SSL_CERT_FILE may name a private authority.
            verify=httpx.create_ssl_context(),
            trust_env=False,
            follow_redirects=False,
            # The whole has a limit of its caller's; this one leaves time for other addresses.
            timeout=httpx.Timeout(None, connect=connect_timeout_s),
            # A connection is its address's in httpx's eyes, and that of one name must not serve another.
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def open(
        self, method: str, url: str, headers: Mapping[str, str], content: bytes = b"", *, tenant: str
    ) -> httpx.Response:
        """Return the answer as soon as its head is there; the caller reads and closes it.

        Args:
            tenant: who named the URL. Names of one tenant that do not resolve hold up no other tenant.

        Raises:
            ForbiddenAddressError: an address of the host may not be called; nothing was sent.
            httpx.TransportError, OSError: there was no answer.
        """
        target = httpx.URL(url)
        addresses = await self._resolve(target, tenant)
        for number, address in enumerate(addresses, 1):
            request = self._http.build_request(
                method,
                target.copy_with(host=str(address)),
                headers={"Host": target.netloc.decode(), **headers},
                content=content,
                extensions={"sni_hostname": target.host},
            )
            try:
                return await self._http.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if number == len(addresses):
                    raise
        raise AssertionError("a host has an address, or resolving it raises")

    async def _resolve(self, target: httpx.URL, tenant: str) -> list[Address]:
        addresses = await self._resolver.resolve(target.host, target.port or 0, tenant)
        for address in addresses:
            if not self._networks.permits(address):
                raise ForbiddenAddressError(
                    f"{target.host} leads to {address}, which is no public address; if it is meant, {self._remedy}"
                )
        return addresses
