"""Check for libraries that only some commands need, and that extras of the package install."""

from __future__ import annotations

from importlib.util import find_spec

from ..shared.errors import ConfigurationError


def need_libraries(user: str, *names: str, extra: str) -> None:
    """Check that libraries are installed, before an import fails.

    Args:
        user: what needs them, as the subject of the message.
        names: the packages, as they are imported.
        extra: extra of penstock that installs them.

    Raises:
        ConfigurationError: a library is not installed.
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ConfigurationError(f"{user} needs {', '.join(missing)}: pip install 'penstock[{extra}]'")
