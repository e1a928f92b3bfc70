"""Access to the pages: by an operator's key, by a proxy's header, or by the app that mounts the pages."""

from __future__ import annotations

import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from itsdangerous import BadSignature, URLSafeTimedSerializer
from starlette.requests import HTTPConnection

from ...producer.control.secret_keys import OperatorKey, OperatorKeys, Role
from ...shared.connection import CommandConnection
from ...shared.deployment.audit import ActorSource
from ...shared.errors import ConfigurationError
from ...shared.keys import Keys
from ...shared.values.shown import shown
from ..views.access import Access

SESSION_COOKIE = "penstock_session"
SESSION_S = 12 * 3600
# A revoked key works for at most this time.
CACHE_TTL_S = 5.0
MAX_CACHED_KEYS = 1000
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
LOOPBACK = ("127.0.0.0/8", "::1/128")


# Returns the access of a request (Starlette's type); None refuses it.
Resolve = Callable[[HTTPConnection], "Access | Awaitable[Access | None] | None"]


def everybody(access: Access) -> Resolve:
    """Let in all requests, for a server that listens on this machine only."""
    return _Everybody(access)


@dataclass(frozen=True)
class _Everybody:
    access: Access
    source: ClassVar = ActorSource.NOBODY_ASKED

    def __call__(self, _: HTTPConnection) -> Access:
        return self.access


@dataclass(frozen=True)
class HeaderAccess:
    """Access for users that a proxy names in a header.

    Args:
        user_header: header with the user's name; requests without it are refused.
        groups_header: header with the user's groups, separated by commas.
        roles: access of users and groups, by name; the highest role counts.
        default: role of users that ``roles`` does not name; None refuses them.
        proxies: networks from which the headers are trusted.
    """

    user_header: str
    groups_header: str = "x-forwarded-groups"
    roles: Mapping[str, Access] = field(default_factory=dict)
    default: Role | None = Role.VIEWER
    proxies: Iterable[Network] = field(default_factory=lambda: parse_networks(LOOPBACK))
    source: ClassVar = ActorSource.PROXY

    def __call__(self, connection: HTTPConnection) -> Access | None:
        user = connection.headers.get(self.user_header, "").strip()
        if not user or not user.isprintable() or not self._is_proxy(connection):
            return None
        groups = [name.strip() for name in connection.headers.get(self.groups_header, "").split(",")]
        matching = [self.roles[name] for name in (user, *groups) if name in self.roles]
        if not matching:
            return None if self.default is None else Access(user, self.default)
        role = max((access.role for access in matching), key=list(Role).index)
        return Access(user, role, any(access.sees_contents for access in matching))

    def _is_proxy(self, connection: HTTPConnection) -> bool:
        if connection.client is None:  # a unix socket: its permissions decide
            return True
        try:
            address = ipaddress.ip_address(connection.client.host)
        except ValueError:
            return False
        return any(address in network for network in self.proxies)


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Parse networks such as 10.0.0.0/8.

    Raises:
        ConfigurationError: a text is not a network.
    """
    try:
        return tuple(ipaddress.ip_network(text) for text in texts)
    except ValueError as error:
        raise ConfigurationError(f"--trusted-proxy must be a network such as 10.0.0.0/8: {error}") from error


def parse_roles(texts: Iterable[str]) -> dict[str, Access]:
    """Parse texts such as ``NAME=ROLE`` or ``NAME=ROLE+contents``, and return the access by name.

    Raises:
        ConfigurationError: a text has another form.
    """
    roles = {}
    for text in texts:
        name, equals, rest = text.rpartition("=")
        role, plus, contents = rest.partition("+")
        if not (name and equals) or role not in tuple(Role) or (plus and contents != "contents"):
            raise ConfigurationError(
                f"--role must be NAME=ROLE or NAME=ROLE+contents with a role of {', '.join(Role)}, got {shown(text)}"
            )
        roles[name] = Access(name, Role(role), bool(plus))
    return roles


class KeyAccess:
    """Access for operators with a key: in a signed cookie after the login, or as ``Authorization: Bearer KEY``.

    The cookie holds the id of the key. Its role is read from Redis, so the sessions of a revoked key end.
    """

    source: ClassVar = ActorSource.OPERATOR_KEY

    def __init__(self, connection: CommandConnection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._store = OperatorKeys(connection, keys)
        self._cached: OrderedDict[str, tuple[float, OperatorKey]] = OrderedDict()
        self._serializer: URLSafeTimedSerializer | None = None

    async def __call__(self, connection: HTTPConnection) -> Access | None:
        scheme, _, key = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            record = await self._store.find(key.strip())
            return None if record is None else _access_of(record)
        cookie = connection.cookies.get(SESSION_COOKIE)
        if not cookie:
            return None
        try:
            key_id = (await self._signer()).loads(cookie, max_age=SESSION_S)
        except BadSignature:
            return None
        record = await self._look_up(str(key_id))
        return None if record is None else _access_of(record)

    async def log_in(self, key: str) -> tuple[Access, str] | None:
        """Return the access of a key and the cookie of a session; None if the key is not valid."""
        record = await self._store.find(key.strip())
        if record is None:
            return None
        return _access_of(record), str((await self._signer()).dumps(record.key_id))

    async def _look_up(self, key_id: str) -> OperatorKey | None:
        now = time.monotonic()
        cached = self._cached.get(key_id)
        if cached is not None and now < cached[0]:
            return cached[1]
        self._cached.pop(key_id, None)
        record = await self._store.get(key_id)
        if record is not None:
            self._cached[key_id] = (now + CACHE_TTL_S, record)
            if len(self._cached) > MAX_CACHED_KEYS:
                self._cached.popitem(last=False)
        return record

    async def _signer(self) -> URLSafeTimedSerializer:
        """Return the signer of cookies. Dashboards of a deployment share its secret, so sessions survive restarts."""
        if self._serializer is None:
            key = self._keys.dashboard_secret()
            await self._connection.execute("SET", key, secrets.token_urlsafe(32), "NX")
            secret = await self._connection.execute("GET", key)
            self._serializer = URLSafeTimedSerializer(secret, salt="penstock.dashboard.session")
        return self._serializer


def _access_of(record: OperatorKey) -> Access:
    return Access(record.name, record.role, record.sees_contents)
