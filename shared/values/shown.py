"""Shows callers' values in our messages: shortened to a readable length, and URLs without their passwords."""

from __future__ import annotations

import re
import reprlib
from decimal import Decimal
from typing import Any, ClassVar

from ..errors import cut

# Names and ids, which have at most 200 characters, are shown whole.
MAX_SHOWN_CHARS = 240
MASK = "***"
# Options of Redis URLs whose values are no secrets.
PUBLIC_OPTIONS = frozenset(
    {
        "db", "client_name", "protocol", "username", "sentinel_username",
        "socket_timeout", "socket_connect_timeout", "socket_keepalive", "retry_on_timeout",
        "max_connections", "health_check_interval",
        "ssl_keyfile", "ssl_certfile", "ssl_cert_reqs", "ssl_ca_certs", "ssl_ca_path",
        "ssl_check_hostname", "ssl_ciphers",
    }
)  # fmt: skip
SECRET_OPTIONS = frozenset({"password", "sentinel_password", "ssl_password", "ssl_ca_data"})
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_HOST = re.compile(r"(?:\[[^\[\]]*\]|[^:\[\]]*)(?::\d*)?")
_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S*")


def shown(value: object) -> str:
    """Return ``repr(value)``, of a large value its beginning and end; a list or dict is not gone through whole."""
    return cut(_repr.repr(value), MAX_SHOWN_CHARS)


class _Repr(reprlib.Repr):
    """Python's own, with more of a string and with integers that Python refuses to write in full."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 10
        self.maxstring = self.maxother = MAX_SHOWN_CHARS

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 256:
            return f"an integer of {x.bit_length()} bits"
        return repr(x)

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """In the caller's order; the base class sorts."""
        if not x or level <= 0:
            return "{...}" if x else "{}"
        items = [f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in list(x)[: self.maxdict]]
        return "{" + ", ".join(items + ["..."] * (len(x) > self.maxdict)) + "}"


_repr = _Repr()


def mask_url(url: str) -> str:
    """Return ``url`` with ``***`` instead of its password, and of the values in its query that may be secret.

    Everything before the last ``@`` counts as user and password. A user without a password is masked, too, because
    it may be a token.
    """
    match = _SCHEME.match(url)
    scheme = match[0] if match else ""
    before, at, after = url[len(scheme) :].rpartition("@")
    user, colon, _ = before.partition(":")
    if "=" in before.partition("?")[2]:
        # The "@" may belong to a password in the query, so that its end would follow.
        return f"{scheme}{MASK}"
    place, fragment_mark, _ = after.partition("#")
    place, query_mark, query = place.partition("?")
    if not at and not all(map(_HOST.fullmatch, place.partition("/")[0].split(","))):
        # The host is missing: what seems to be the port may be the password.
        return f"{scheme}{MASK}"
    userinfo = "" if not at else f"{user}:{MASK}@" if colon else f"{MASK}@"
    return f"{scheme}{userinfo}{place}{query_mark}{'&'.join(_shown_options(query))}{fragment_mark and '#' + MASK}"


def mask_text(text: str) -> str:
    """Return ``text`` with ``mask_url`` applied to the URLs in it that have a password or a query."""
    if "://" not in text:
        return text
    return _IN_TEXT.sub(lambda match: mask_url(match[0]) if re.search("[@?]", match[0]) else match[0], text)


def _shown_options(query: str) -> list[str]:
    """Return the parts of a query as they may be shown.

    What follows a secret value belongs to it if it is not a known option: ``&`` in a password must be percent-encoded,
    and may not be.
    """
    parts: list[str] = []
    is_secret_before = False
    for part in query.split("&"):
        name, equals, _ = part.partition("=")
        if equals and name in PUBLIC_OPTIONS:
            parts.append(part)
        elif equals and (name in SECRET_OPTIONS or not is_secret_before):
            parts.append(f"{name}={MASK}")
            is_secret_before = True
        elif part and not is_secret_before:
            parts.append(MASK)
            is_secret_before = True
    return parts


class MaskedRepr:
    """Base of structs that hold URLs or secrets: the repr shows URLs masked, and no value of ``_secret_fields``."""

    __slots__ = ()
    _secret_fields: ClassVar[frozenset[str]] = frozenset()
    __struct_fields__: ClassVar[tuple[str, ...]]

    def __repr__(self) -> str:
        fields = (f"{name}={mask_text(repr(value))}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({', '.join(fields)})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Return the fields for rich's tracebacks, as ``repr`` shows them."""
        return [(name, self._fit_to_show(name)) for name in self.__struct_fields__]

    def _fit_to_show(self, name: str) -> Any:
        value = getattr(self, name)
        if name in self._secret_fields:
            return MASK if value else value
        return mask_text(value) if isinstance(value, str) else value


def format_number(value: float, *, separator: str = "") -> str:
    """Return a number with at most 15 digits and without an exponent: "0.0000421".

    Args:
        separator: of thousands.
    """
    return f"{Decimal(f'{value:.15g}'):,f}".replace(",", separator)


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes in the unit that suits it: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
