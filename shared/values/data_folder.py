"""The folder of the user's data."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ConfigurationError


def data_folder() -> Path:
    """Return the folder of Penstock's own data: PENSTOCK_DATA_DIR, else the user's data folder.

    Raises:
        ConfigurationError: this user has no home, as in a container with an arbitrary user id.
    """
    explicit = os.environ.get("PENSTOCK_DATA_DIR")
    if explicit:
        return Path(explicit).absolute()
    base = os.environ.get("XDG_DATA_HOME")
    try:
        return (Path(base) if base else Path.home() / ".local" / "share").absolute() / "penstock"
    except RuntimeError as error:
        raise ConfigurationError("this user has no home folder; set PENSTOCK_DATA_DIR or PENSTOCK_REDIS_URL") from error
