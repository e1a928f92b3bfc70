"""The files of the embedded Redis, and the locks that tell who uses them.

The kernel drops a file lock when its process ends, whatever killed it. Windows has no such locks.

    lock     exclusive, while a process starts or stops the server: starts and stops never overlap
    users    shared, by every user for as long as it uses the server
    server   exclusive, inherited by the server itself: held means that it, and nothing else, owns the data
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import quote

from ...errors import ConfigurationError
from ...values.data_folder import data_folder

# Linux allows 107 bytes, macOS 103.
MAX_SOCKET_PATH_BYTES = 100
try:
    import fcntl
except ImportError:
    fcntl = None
HAS_LOCKS = fcntl is not None


@dataclass(frozen=True)
class ServerFolder:
    """Folder of the server's data, log, locks and socket."""

    root: Path
    socket: Path

    @classmethod
    def prepare(cls, data_dir: Path | None = None) -> ServerFolder:
        """Return the folder below ``data_dir`` (``data_folder()`` when None), made if need be, closed to other users.

        Raises:
            ConfigurationError: it cannot be made, or belongs to somebody else, or this system has no locks of files.
        """
        if not HAS_LOCKS:
            raise ConfigurationError(
                "the embedded Redis needs Linux or macOS; give the URL of a Redis server, or set PENSTOCK_REDIS_URL"
            )
        root = (data_dir or data_folder()).absolute() / "redis"
        socket = root / "redis.sock"
        _make_private(root)
        if len(os.fsencode(socket)) > MAX_SOCKET_PATH_BYTES:
            # The same place for the same folder in every environment: a cron job has no XDG_RUNTIME_DIR.
            digest = hashlib.sha256(os.fsencode(root)).hexdigest()[:12]
            socket = Path(f"/tmp/penstock-{os.getuid()}-{digest}/redis.sock")
            _make_private(socket.parent)
        return cls(root=root, socket=socket)

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self.socket))}"

    @property
    def log(self) -> Path:
        return self.root / "redis.log"

    @property
    def pid_file(self) -> Path:
        return self.root / "redis.pid"

    @property
    def users_lock(self) -> Path:
        return self.root / "users"

    @property
    def server_lock(self) -> Path:
        return self.root / "server"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other commands from starting or stopping the server meanwhile."""
        with (self.root / "lock").open("ab") as file:
            lock(file)
            yield

    def is_running(self) -> bool:
        """Whether the server's process lives; it may not answer."""
        return is_locked(self.server_lock)

    def has_users(self) -> bool:
        """Whether a live process is registered as a user."""
        return is_locked(self.users_lock)

    def last_log_line(self) -> str:
        """Return what the server said last, for an error message."""
        with suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()
            return next((line.strip() for line in reversed(lines) if line.strip()), "(empty)")
        return "(missing)"


def _make_private(folder: Path) -> None:
    """Make ``folder``; in /tmp somebody else may have been faster, and would own our socket."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise ConfigurationError(f"{folder} belongs to another user; set PENSTOCK_DATA_DIR to a folder of your own")
        if stat.S_IMODE(status.st_mode) != 0o700:
            folder.chmod(0o700)
    except OSError as error:
        raise ConfigurationError(
            f"the folder {folder} cannot be used ({error.strerror}); set PENSTOCK_DATA_DIR to one that can"
        ) from error


def lock(file: IO[bytes], *, is_shared: bool = False) -> None:
    """Wait for the lock of ``file`` and hold it until the file is closed."""
    assert fcntl is not None
    fcntl.flock(file, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)


def is_locked(path: Path) -> bool:
    """Whether a live process holds the lock of the file, shared or not."""
    assert fcntl is not None
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
