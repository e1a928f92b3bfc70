"""What a command holds while it uses the embedded Redis, and the choice between it and a given URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Self

from redis.exceptions import RedisError

from ...errors import RedisUnavailableError
from ...process.secret_files import variable_or_file
from ..url import parse_pool
from .folder import ServerFolder, lock
from .server import ensure_running, in_use, shut_down

REDIS_URL_VARIABLE = "PENSTOCK_REDIS_URL"


def resolve_redis_url(explicit: str | None) -> AbstractContextManager[str]:
    """Return a context whose value is the URL: ``explicit``, that of PENSTOCK_REDIS_URL, or the embedded Redis.

    Raises:
        ConfigurationError: the given URL or its file cannot be read, or no embedded Redis can be started (on entering).
    """
    return given_or_embedded(explicit or variable_or_file(REDIS_URL_VARIABLE))


def given_or_embedded(url: str | None) -> AbstractContextManager[str]:
    """Return a context whose value is ``url``, or that of the embedded Redis if it is None or empty.

    Raises: as ``resolve_redis_url``.
    """
    if url:
        parse_pool(url)
        return nullcontext(url)
    return _embedded_url()


@contextmanager
def _embedded_url() -> Iterator[str]:
    with EmbeddedRedis.start() as embedded:
        yield embedded.url


class EmbeddedRedis:
    """Use of the embedded Redis by a process; the server lives at least until ``close``.

    Synchronous: starting takes about 30 ms, so commands do it before their event loop runs.
    """

    def __init__(self, folder: ServerFolder, user: IO[bytes]) -> None:
        self._folder = folder
        self._user = user

    @classmethod
    def start(cls, data_dir: Path | None = None) -> Self:
        """Start the server of ``data_dir`` (``data_folder()`` when None), or join the one that runs.

        Raises:
            ConfigurationError: the folder cannot be used, or there is no redis-server program.
            RedisUnavailableError: the server does not start or does not answer; the message quotes its log.
        """
        folder = ServerFolder.prepare(data_dir)
        with folder.locked():
            ensure_running(folder)
            user = folder.users_lock.open("ab")
            lock(user, is_shared=True)
        return cls(folder, user)

    @property
    def url(self) -> str:
        return self._folder.url

    @property
    def is_server_running(self) -> bool:
        """Whether the server's process is alive."""
        return self._folder.is_running()

    def close(self, *, force: bool = False) -> None:
        """Leave; the last user to leave stops the server, and with ``force`` any. Closing twice does nothing."""
        if self._user.closed:
            return
        with self._folder.locked():
            self._user.close()
            # A server that died or hangs must not turn the end of a command into a failure.
            with suppress(RedisError, RedisUnavailableError):
                if force or not in_use(self._folder):
                    shut_down(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
