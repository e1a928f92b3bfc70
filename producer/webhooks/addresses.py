"""Which addresses may be called: those of the public Internet, and networks that the operator has named.

A webhook's URL comes from a caller, and the one who calls it stands inside the deployment's network: without a guard a
caller could have it ask a metadata service, a database or a neighbour (server-side request forgery). What counts is the
address, so every address that a name resolves to is checked, and the connection goes to one that was.

Sources: IANA's registries of special-purpose addresses, as Python's ``ipaddress`` has them, and ``_SPECIAL``; RFC 4291,
3056, 4380, 5214, 6052 for IPv4 inside IPv6.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from ...shared.errors import ConfigurationError, ValidationError
from ...shared.shown import shown
from ...shared.urls import mask_url

MAX_URL_CHARS = 2048
ALL = "all"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# What ``is_global`` lets pass, in some version of Python: no host of the public Internet has such an address.
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # protocol assignments: anycast to the next router among them
            "192.31.196.0/24",  # AS112
            "192.52.193.0/24",  # multicast relays
            "192.88.99.0/24",  # relays of 6to4
            "192.175.48.0/24",  # AS112
            "64:ff9b:1::/48",  # NAT64 of a network's own
            "100::/32",  # discarded, and dummies
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
        ConfigurationError: one of ``allowed`` is no network.
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
        """Whether it is public, or named; an address that holds another is judged by that one, too."""
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
    """The IPv4 address that is reached by an IPv6 one; None if it is no such."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (None if teredo is None else teredo[1])


def _isatap(address: Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address to which a network with ISATAP tunnels; None if the address has not that form."""
    if isinstance(address, ipaddress.IPv4Address) or (int(address) >> 32) & 0xFFFFFFFF not in _ISATAP:
        return None
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)


def literal_address(host: str) -> Address | None:
    """Return the address that a host is spelled as, old ways of IPv4 (``0x7f.1``) included; None if it is a name."""
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
    """Return ``url`` if it is one that can be called, whatever the address.

    Raises:
        ValidationError: it is none; the message names ``webhook_url``.
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
        raise ValidationError("webhook_url must hold no user or password: events are signed instead")
    return url


def _shown_url(url: object) -> str:
    return shown(mask_url(url) if isinstance(url, str) else url)


def check_literal(url: str, networks: Networks) -> None:
    """Refuse a URL whose host is spelled as an address that may not be called; names are looked up when they are.

    Raises:
        ValidationError: it is such a URL.
    """
    address = literal_address(urlsplit(url).hostname or "")
    if address is not None and not networks.permits(address):
        raise ValidationError(
            f"webhook_url must not lead to {address}, which is no public address, got {_shown_url(url)}; if it is "
            "meant, start 'penstock jobs' with --allow-private-webhooks and its network"
        )
