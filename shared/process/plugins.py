"""Entry points of installed distributions for workers and gateways. None is loaded unless it is named.

A distribution declares, in its ``pyproject.toml``::

    [project.entry-points."penstock.logits_processors"]
    ban = "my_package.processors:Ban"

and ``worker start --logits-processors ban`` takes it, as ``--logits-processors my_package.processors:Ban`` does.
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..errors import ConfigurationError
from ..values.shown import shown

LOGITS_PROCESSORS = "penstock.logits_processors"
RPC_MODULES = "penstock.rpc_modules"
STAT_LOGGERS = "penstock.stat_loggers"
ORDERING_POLICIES = "penstock.ordering_policies"
EXECUTORS = "penstock.executors"
IO_PROCESSORS = "penstock.io_processors"
# By group, the option that takes its names: of `worker start`, the last one of `gateway`.
OPTION_OF_GROUP = {
    LOGITS_PROCESSORS: "--logits-processors",
    RPC_MODULES: "--rpc-module",
    STAT_LOGGERS: "--stat-logger",
    ORDERING_POLICIES: "--scheduling-policy",
    EXECUTORS: "--executor",
    IO_PROCESSORS: "--io-processor",
}


def plugins_of(group: str) -> dict[str, list[EntryPoint]]:
    """Return the installed entry points of ``group`` by name, several if distributions share one. Loads nothing."""
    by_name: dict[str, list[EntryPoint]] = {}
    for point in sorted(entry_points(group=group), key=lambda point: (point.name, point.value)):
        if point.value not in [known.value for known in by_name.get(point.name, ())]:
            by_name.setdefault(point.name, []).append(point)
    return by_name


def load_object(group: str, text: str) -> Any:
    """Return the object that an operator has named: ``MODULE:NAME``, or an entry point of ``group``.

    Raises:
        ConfigurationError: there is no such thing, two have that name, or its module cannot be imported.
    """
    option = OPTION_OF_GROUP[group]
    module, colon, name = text.partition(":")
    if not colon:
        return _load_point(group, text)
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
    except Exception as error:  # whatever its code raises
        raise _cannot(f"{option} {text}", error) from error
    return target


def load_module(group: str, text: str) -> Any:
    """Return the module that an operator has named: an entry point of ``group``, or the module's own name.

    Raises:
        ConfigurationError: as ``load_object``.
    """
    if text in plugins_of(group):
        return _load_point(group, text)
    try:
        return importlib.import_module(text)
    except Exception as error:  # whatever its code raises
        raise _cannot(f"{OPTION_OF_GROUP[group]} {text}", error) from error


def _load_point(group: str, name: str) -> Any:
    installed, option = plugins_of(group), OPTION_OF_GROUP[group]
    points = installed.get(name)
    if points is None:
        available = f"those installed are {', '.join(installed)}" if installed else "none is installed"
        raise ConfigurationError(
            f"{option} {shown(name)} is no entry point of the group {group}, of which {available}; "
            "name one of them, or MODULE:NAME"
        )
    if len(points) > 1:
        values = ", ".join(point.value for point in points)
        raise ConfigurationError(f"{option} {shown(name)} names several entry points ({values}); name MODULE:NAME")
    try:
        return points[0].load()
    except Exception as error:  # whatever its code raises
        raise _cannot(f"{option} {name} ({points[0].value})", error) from error


def _cannot(named: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"{named} cannot be imported: {type(error).__name__}: {error}")
