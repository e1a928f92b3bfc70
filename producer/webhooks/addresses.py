"""Decide which addresses webhooks may call: those of the public Internet, and networks that the operator names.

A webhook's URL comes from a caller, and the process that calls it runs inside the deployment's network. Without this
check a caller could make it send requests to a metadata service, a database or a neighbour (server-side request
forgery). Every address that a name resolves to is checked, and the connection goes to a checked address.

Sources: IANA's registries of special-purpose addresses, as in Python's ``ipaddress``, and ``_SPECIAL``; RFC 4291, 3056,
4380, 5214, 6052 for IPv4 inside IPv6.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from ...shared.errors import ConfigurationError, ValidationError
from ...shared.values.shown import mask_url, shown

MAX_URL_CHARS = 2048
ALL = "all"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Addresses that ``is_global`` accepts in some version of Python, though no public host has them.
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # protocol assignments: anycast to the next router among them
            "192.31.196.0/24",  # AS112
            "192.52.193.0/24",  # multicast relays
            "192.88.99.0/24",  # relays of 6to4
            "192.175.48.0/24",  # AS112
            "64:ff9b:1::/48",  # NAT64 inside a network
            "100::/32",  # discard-only and dummy addresses
            "2001::/23",  # protocol assignments; Teredo is judged by its inner address
            "2001:db8::/32",  # documentation
            "2620:4f:8000::/48",  # AS112
            "3fff::/20",  # documentation
            "5f00::/16",  # segment routing
            "fec0::/10",  # site-local, which networks still use
        ),
    )
)
# The interface part of an address of ISATAP, before its IPv4 address.
_ISATAP = (0x00005EFE, 0x02005EFE)


class Networks:
    """The addresses that may be called.

    Raises:
        ConfigurationError: an item of ``allowed`` is not a network.
    """

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        names = list(allowed)
        self._all = ALL in names
        try:
            self._allowed = [ipaddress.ip_network(name, strict=False) for name in names if name != ALL]
        except ValueError as error:
            raise ConfigurationError(
                f"allowed_networks must be networks such as 10.0.0.0/8, or {ALL!r}: {error}"
            ) from error

    def permits(self, address: Address) -> bool:
        """Return whether an address is public or allowed.

        An IPv6 address that contains an IPv4 address is judged by both.
        """
        if self._all or any(address in network for network in self._allowed):
            return True
        inner = _inner(address)
        if inner is not None:
            return self.permits(inner)
        # Not by is_private, which leaves out carriers' shared space (100.64.0.0/10).
        if not address.is_global or address.is_multicast or address.is_reserved:
            return False
        isatap = _isatap(address)
        return not any(address in network for network in _SPECIAL) and (isatap is None or self.permits(isatap))


def _inner(address: Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that an IPv6 address leads to; None if it is not of that kind."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (None if teredo is None else teredo[1])


def _isatap(address: Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address to which a network with ISATAP tunnels; None if the address does not have that form."""
    if isinstance(address, ipaddress.IPv4Address) or (int(address) >> 32) & 0xFFFFFFFF not in _ISATAP:
        return None
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)


def literal_address(host: str) -> Address | None:
    """Return the address that a host is written as, including old forms of IPv4 (``0x7f.1``); None if it is a name."""
    host = host.rstrip(".").partition("%")[0]
    if host.lower() == "localhost" or host.lower().endswith(".localhost"):
        return ipaddress.IPv4Address("127.0.0.1")
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, UnicodeEncodeError):
        return None


def check_url(url: object) -> str:
    """Return ``url`` if it is a valid webhook URL. Its address is not checked.

    Raises:
        ValidationError: it is invalid; the message names ``webhook_url``.
    """
    if not isinstance(url, str) or not 0 < len(url) <= MAX_URL_CHARS or not url.isprintable() or " " in url:
        raise ValidationError(f"webhook_url must be a URL of at most {MAX_URL_CHARS} characters, got {_shown_url(url)}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        # urlsplit quotes parts of the URL in its messages.
        raise ValidationError(f"webhook_url cannot be read, got {_shown_url(url)}") from None
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise ValidationError(f"webhook_url must be http://HOST… or https://HOST…, got {_shown_url(url)}")
    if parts.username is not None or parts.password is not None:
        raise ValidationError("webhook_url must not contain a user or password: events are signed instead")
    return url


def _shown_url(url: object) -> str:
    return shown(mask_url(url) if isinstance(url, str) else url)


def check_literal(url: str, networks: Networks) -> None:
    """Refuse a URL whose host is written as a forbidden address. Names are checked when they are resolved.

    Raises:
        ValidationError: the address is forbidden.
    """
    address = literal_address(urlsplit(url).hostname or "")
    if address is not None and not networks.permits(address):
        raise ValidationError(
            f"webhook_url must not lead to {address}, which is not a public address, got {_shown_url(url)}; to allow "
            "it, start 'penstock jobs' with --allow-private-webhooks and its network"
        )
