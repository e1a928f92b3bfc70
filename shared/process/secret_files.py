"""Secrets from the environment: from a variable, or from the file that the variable NAME_FILE names.

A variable can be read by any user who may inspect the process, and by its children. A file has an owner and rights, and
is how Docker (``/run/secrets``), Kubernetes (a mounted Secret) and systemd (``LoadCredential``) pass secrets.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import ConfigurationError

SUFFIX = "_FILE"


def variable_or_file(name: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the value of the variable, or the content of the file that ``NAME_FILE`` names; empty without both.

    Args:
        environment: ``os.environ`` when None.

    Raises:
        ConfigurationError: both are set, or the file cannot be read or is empty.
    """
    environment = os.environ if environment is None else environment
    value, path = environment.get(name, ""), environment.get(name + SUFFIX, "")
    if not path:
        return value
    if value:
        raise ConfigurationError(f"{name} and {name}{SUFFIX} are both set; unset one of them")
    try:
        content = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigurationError(
            f"{name}{SUFFIX} names {path}, which cannot be read ({reason}); correct the path, or its rights"
        ) from error
    if not content:
        raise ConfigurationError(f"{name}{SUFFIX} names {path}, which is empty; write the value into it")
    return content
