"""Redis URLs, read with redis-py's rules after a check that there is only one reading.

``sentinel.py`` has the rules for Sentinels. ``mask_url`` of ``shared/values/shown.py`` shows a URL without its
password.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)

from ..errors import ConfigurationError, ValidationError
from ..values.checks import check_encodable
from ..values.shown import PUBLIC_OPTIONS, SECRET_OPTIONS, mask_url, shown
from . import sentinel

try:
    from redis.driver_info import DriverInfo  # type: ignore[import-not-found]  # redis-py has it from 7.2 on
except ImportError:
    DriverInfo = None

CLUSTER_SCHEMES = ("redis+cluster://", "rediss+cluster://")
SCHEMES = ("redis://", "rediss://", "unix://", *sentinel.SCHEMES)

# From 7.2 on redis-py looks on the disk for its own version at every connection, in the event loop, unless it is told.
_DRIVER: dict[str, Any] = {} if DriverInfo is None else {"driver_info": DriverInfo()}

_ENCODE = "characters such as / ? # @ : % & in the user or the password must be percent-encoded (%2F for /)"
_CERTIFICATE_CHECKS = ("none", "optional", "required")


def unreadable(url: str, reason: str) -> ConfigurationError:
    """Return the error for a Redis URL that cannot be read; the remedy names percent-encoding if it may be missing."""
    remedy = f"; {_ENCODE}" if "@" in url else ""
    return ConfigurationError(f"the Redis URL {shown(mask_url(url))} cannot be read: {reason}{remedy}")


def _host_check(url: str) -> dict[str, bool]:
    """Return options that verify the certificate's host as well as its issuer, as redis-py does from 6.0 on.

    The URL's ``ssl_check_hostname`` and ``ssl_cert_reqs`` override them.
    """
    verifies = url.startswith("rediss://") and not re.search(r"[?&]ssl_cert_reqs=(none|optional)", url)
    return {"ssl_check_hostname": True} if verifies else {}


def parse_pool(url: str, **options: Any) -> ConnectionPool:
    """Return a pool whose ``make_connection()`` opens connections to ``url``; nothing is opened yet.

    Keep the pool for as long as its connections, which ask it where the primary is if the URL names Sentinels.

    Raises:
        ConfigurationError: the URL has another scheme than those, or cannot be read. No message holds its password.
    """
    if isinstance(url, str) and url.startswith(CLUSTER_SCHEMES):
        raise ConfigurationError(
            f"the home Redis cannot be a cluster, which holds models only: name {shown(mask_url(url))} in "
            "PENSTOCK_SHARDS, and give the URL of a server, or of Sentinels, for jobs, batches and what else "
            "belongs to no model"
        )
    if not isinstance(url, str) or not url.startswith(SCHEMES):
        raise ConfigurationError(
            f"the Redis URL must begin with {', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}, got {shown(mask_url(str(url)))}"
        )
    check_options(url)
    is_sentinel = url.startswith(sentinel.SCHEMES)
    reason = "" if is_sentinel else _complaint(url)
    if not reason:
        try:
            # RESP2, where a subscription's messages are replies like others; redis-py 8 would speak RESP3 by default.
            make_pool = sentinel.sentinel_pool if is_sentinel else ConnectionPool.from_url
            return make_pool(url, protocol=2, **_DRIVER, **_host_check(url), **options)
        except ValueError as error:
            # These two quote no value of the URL.
            is_public = isinstance(error, sentinel.AddressError) or "Invalid value for" in str(error)
            reason = str(error) if is_public else "it is no URL"
    # Outside the handler: a traceback would print what redis-py says, which may quote the password.
    raise unreadable(url, reason)


def check_options(url: str) -> None:
    """Verify the characters of a Redis URL and the options in its query.

    Raises:
        ConfigurationError: there is a character that no URL has, or an option that is unknown or cannot be used.
    """
    reason = ""
    try:
        check_encodable("url", url)
    except ValidationError:
        reason = "it has characters that UTF-8 cannot encode"
    if reason or re.search(r"[\x00-\x1f\x7f]", url):
        raise unreadable(url, reason or "it has a line break or another control character")
    query = url.partition("?")[2].partition("#")[0]
    shown_names = re.findall("[?&]([^=]*)=", mask_url(url))
    names: set[str] = set()
    for part in filter(None, query.split("&")):
        name, equals, value = part.partition("=")
        if not equals:
            raise unreadable(url, "each option must be NAME=VALUE")
        if name not in _options_of(url):
            # What is no option may be a part of the password.
            subject = f"{name} is no option" if name in shown_names else "it has an option that is unknown"
            raise unreadable(url, f"{subject}; options here are {', '.join(sorted(_options_of(url)))}")
        if name in names:
            raise unreadable(url, f"the option {name} is given twice")
        names.add(name)
        if name == "protocol" and value != "2":
            raise unreadable(url, "Penstock speaks RESP2, so leave the option protocol out")
        if name == "ssl_cert_reqs" and value not in _CERTIFICATE_CHECKS:
            raise unreadable(url, f"ssl_cert_reqs must be one of {', '.join(_CERTIFICATE_CHECKS)}")


def _options_of(url: str) -> set[str]:
    """Return the options that a connection to ``url`` takes with the installed redis-py."""
    is_encrypted, is_sentinel = url.startswith("rediss"), url.startswith(sentinel.SCHEMES)
    kind = UnixDomainSocketConnection if url.startswith("unix") else SSLConnection if is_encrypted else Connection
    accepted = {"max_connections", *_parameters(kind), *_parameters(AbstractConnection)}
    own = {name for name in PUBLIC_OPTIONS | SECRET_OPTIONS if name.startswith("sentinel_")} if is_sentinel else set()
    return own | (accepted & (PUBLIC_OPTIONS | SECRET_OPTIONS))


def _parameters(kind: type[AbstractConnection]) -> set[str]:
    return set(inspect.signature(kind.__init__).parameters)


def _complaint(url: str) -> str:
    """Return why the URL of one server cannot be read, without quoting it; empty if it can."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "it is no URL"
    place = parts.netloc.rpartition("@")[2]
    if "#" in url:
        return "it has a '#'"
    if url.startswith("unix://"):
        if not hasattr(asyncio, "open_unix_connection"):
            return "this system has no unix sockets in Python; use redis:// with a host and a port"
        return "it must be unix:///PATH, or unix://USER:PASSWORD@/PATH" if place or parts.path in ("", "/") else ""
    try:
        # The resolver refuses such names by a UnicodeError.
        (parts.hostname or "").encode("idna")
        is_port = parts.port != 0
    except UnicodeError:
        return "it has no valid host name"
    except ValueError:
        is_port = False
    if not is_port:
        return "the port must be a number from 1 to 65535"
    if not re.fullmatch(r"/?|/[0-9]+/?", unquote(parts.path)):
        return "what follows the host must be the number of a database, such as /0"
    try:
        parse_qsl(parts.query, errors="strict")
    except ValueError:
        return "its options are not UTF-8"
    return ""
