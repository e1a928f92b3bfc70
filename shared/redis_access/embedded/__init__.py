"""The embedded Redis: a private ``redis-server`` for commands that were given no URL.

The first user starts it, later ones join, the last one to leave stops it; its append-only file keeps the data.
It listens on a unix socket only, in a folder that only this user may enter, and on no TCP port.
"""

from .embedded import REDIS_URL_VARIABLE, EmbeddedRedis, given_or_embedded, resolve_redis_url
from .folder import ServerFolder
from .server import ServerStatus, find_redis_cli, find_redis_server, read_status, stop

__all__ = [
    "REDIS_URL_VARIABLE",
    "EmbeddedRedis",
    "ServerFolder",
    "ServerStatus",
    "find_redis_cli",
    "find_redis_server",
    "given_or_embedded",
    "read_status",
    "resolve_redis_url",
    "stop",
]
