"""The user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for files that can be created again: downloads, and what is derived from models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "penstock"
