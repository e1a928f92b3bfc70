"""Keys that let somebody in: how they look, and what is kept of them.

A key is ``PREFIX-ID-SECRET``. Redis holds, by the id, the SHA-256 of the whole key: a key has 256 random bits, so
nobody finds it by trying, and a slow hash, which is for words that people choose, would only cost each request its
time. The key itself is shown once, when it is made.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

from ..shared.errors import ValidationError
from ..shared.shown import shown

_FORM = re.compile(r"([a-z]+)-([0-9a-f]{12})-[A-Za-z0-9_-]{43}")
MAX_KEY_NAME_CHARS = 200


def make_key(prefix: str) -> tuple[str, str, bytes]:
    """Return a new key, its public id, and its digest."""
    key_id = secrets.token_hex(6)
    key = f"{prefix}-{key_id}-{secrets.token_urlsafe(32)}"
    return key, key_id, digest_of(key)


def key_id_of(prefix: str, key: str) -> str | None:
    """Return the public part of a key; None if it has not the form of one with that prefix."""
    match = _FORM.fullmatch(key)
    return match[2] if match is not None and match[1] == prefix else None


def digest_of(key: str) -> bytes:
    """Return what is kept of a key."""
    return hashlib.sha256(key.encode()).digest()


def matches(key: str, digest: bytes) -> bool:
    """Whether ``digest`` is that of ``key``; takes the same time wherever they differ."""
    return hmac.compare_digest(digest_of(key), digest)


def check_key_name(name: str) -> str:
    """Return ``name`` if people can know a key by it.

    Raises:
        ValidationError: it is too long, or cannot be printed.
    """
    if len(name) > MAX_KEY_NAME_CHARS or not name.isprintable():
        raise ValidationError(f"name must have at most {MAX_KEY_NAME_CHARS} printable characters, got {shown(name)}")
    return name
