"""HTTP calls to checked addresses, without redirects or proxies, and with a time limit on every wait.

A name is resolved here once. All its addresses are checked, and the connection goes to one of them, so a name that
resolves differently a moment later has no effect. Certificate and ``Host`` are those of the name.

Names are resolved in dedicated threads, so that names that do not resolve delay only their owner. The system's lookup
(``getaddrinfo``) blocks a thread, for up to half a minute if no name server answers, and cannot be cancelled. The event
loop's own threads are few and serve everything else.

Invariants: at most ``MAX_THREADS`` lookups run, and at most ``MAX_PER_OWNER`` of one owner. Owners with waiting lookups
take turns. Callers with the same owner and name share one lookup.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress

import httpx

from ...shared.values.shown import shown
from .addresses import Address, Networks

# Threads only wait for a reply from the network.
MAX_THREADS = 128
MAX_PER_OWNER = 4

_Key = tuple[str, int]


class UnresolvedNameError(OSError):
    """A host name was not resolved in time."""


class _Lookup:
    """A lookup, running or waiting for a thread."""

    def __init__(self, owner: str, key: _Key) -> None:
        self.owner = owner
        self.key = key
        self.addresses: asyncio.Future[list[Address]] = asyncio.get_running_loop().create_future()
        self.num_callers = 0


class Resolver:
    """Resolves names for any number of owners.

    Args:
        timeout_s: how long a caller waits for a name. The thread may wait longer, and counts until it returns.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._running: dict[str, dict[_Key, _Lookup]] = {}
        # By owner; the next owner is first.
        self._waiting: OrderedDict[str, OrderedDict[_Key, _Lookup]] = OrderedDict()
        self._num_running = 0

    async def resolve(self, host: str, port: int, owner: str) -> list[Address]:
        """Return the addresses of ``host``, at least one.

        Args:
            owner: the tenant that the lookup is charged to.

        Raises:
            UnresolvedNameError: no reply arrived in time.
            OSError, ValueError: the name does not exist or is invalid.
        """
        with suppress(ValueError):
            return [ipaddress.ip_address(host.partition("%")[0])]
        lookup = self._get_or_start(owner, (host, port))
        lookup.num_callers += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                # Other callers may wait for the same lookup.
                return await asyncio.shield(lookup.addresses)
        except TimeoutError:
            raise UnresolvedNameError(f"{shown(host)} was not resolved within {self._timeout_s:g} s") from None
        finally:
            lookup.num_callers -= 1
            if not lookup.num_callers:
                self._drop_unused(lookup)

    def _get_or_start(self, owner: str, key: _Key) -> _Lookup:
        for lookups in (self._running, self._waiting):
            lookup = lookups.get(owner, {}).get(key)
            if lookup is not None:
                return lookup
        lookup = self._waiting.setdefault(owner, OrderedDict())[key] = _Lookup(owner, key)
        self._start_lookups()
        return lookup

    def _drop_unused(self, lookup: _Lookup) -> None:
        """Drop a lookup that has no callers left, unless it has a thread."""
        waiting = self._waiting.get(lookup.owner, {})
        if waiting.get(lookup.key) is lookup:
            del waiting[lookup.key]
            if not waiting:
                del self._waiting[lookup.owner]

    def _start_lookups(self) -> None:
        """Assign free threads to waiting lookups. The owners take turns."""
        while self._num_running < MAX_THREADS:
            owner = next((name for name in self._waiting if len(self._running.get(name, ())) < MAX_PER_OWNER), None)
            if owner is None:
                return
            waiting = self._waiting.pop(owner)
            _, lookup = waiting.popitem(last=False)
            if waiting:
                self._waiting[owner] = waiting
            self._running.setdefault(owner, {})[lookup.key] = lookup
            self._num_running += 1
            # A daemon thread, so that a process can end without waiting for a name server.
            thread = threading.Thread(
                target=self._look_up, args=(asyncio.get_running_loop(), lookup), name="resolver", daemon=True
            )
            thread.start()

    def _look_up(self, loop: asyncio.AbstractEventLoop, lookup: _Lookup) -> None:
        """Call the system's lookup, in a thread."""
        addresses: list[Address] = []
        failure: Exception | None = None
        try:
            infos = socket.getaddrinfo(*lookup.key, type=socket.SOCK_STREAM)
            addresses = [ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in infos]
        except Exception as error:  # the caller's loop raises it
            failure = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._end_lookup, lookup, addresses, failure)

    def _end_lookup(self, lookup: _Lookup, addresses: list[Address], failure: Exception | None) -> None:
        self._num_running -= 1
        running = self._running[lookup.owner]
        del running[lookup.key]
        if not running:
            del self._running[lookup.owner]
        if failure is None:
            lookup.addresses.set_result(addresses)
        elif lookup.num_callers:
            lookup.addresses.set_exception(failure)
        self._start_lookups()


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
