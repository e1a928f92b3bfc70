"""HTTP calls to checked addresses, without redirects or proxies, and with a time limit on every wait.

A name is resolved here once. All its addresses are checked, and the connection goes to one of them, so a name that
resolves differently a moment later has no effect. Certificate and ``Host`` are those of the name.
"""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from .addresses import Address, Networks
from .resolver import Resolver


class ForbiddenAddressError(Exception):
    """The URL leads to an address that this deployment may not call."""


class GuardedHTTP:
    """Calls URLs from untrusted sources, any number concurrently.

    Args:
        networks: the addresses that may be called.
        connect_timeout_s: to resolve a name, and to connect to one of its addresses.
        remedy: how to allow a forbidden address; the end of the error message.
    """

    def __init__(self, networks: Networks, *, connect_timeout_s: float, remedy: str) -> None:
        self._networks = networks
        self._remedy = remedy
        self._resolver = Resolver(connect_timeout_s)
        self._http = httpx.AsyncClient(
            # Only this reads the environment: SSL_CERT_FILE may name a private authority.
            verify=httpx.create_ssl_context(),
            trust_env=False,
            follow_redirects=False,
            # The caller limits the whole time; this limit leaves time for other addresses.
            timeout=httpx.Timeout(None, connect=connect_timeout_s),
            # httpx identifies connections by address, so one opened for one name could serve another.
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def open(
        self, method: str, url: str, headers: Mapping[str, str], content: bytes = b"", *, tenant: str
    ) -> httpx.Response:
        """Return the response as soon as its head has arrived; the caller reads and closes it.

        Args:
            tenant: the tenant that passed the URL. Names of one tenant that do not resolve delay no other tenant.

        Raises:
            ForbiddenAddressError: an address of the host may not be called; nothing was sent.
            httpx.TransportError, OSError: no response arrived.
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
                    f"{target.host} leads to {address}, which is not a public address; to allow it, {self._remedy}"
                )
        return addresses
