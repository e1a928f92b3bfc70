"""Libraries that only some commands need, and that an extra of the package brings."""

from __future__ import annotations

from importlib.util import find_spec

from ..shared.errors import ConfigurationError


def need_libraries(who: str, *names: str, extra: str) -> None:
    """Say what to install before an import fails.

    Args:
        who: what needs them, as the message begins.
        names: the packages, as they are imported.
        extra: of penstock, that brings them.

    Raises:
        ConfigurationError: one is not installed.
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ConfigurationError(f"{who} needs {', '.join(missing)}: pip install 'penstock[{extra}]'")
