"""Display of options: the effective ones, and the guide's tables."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from .option import NONE
from .program import Program, default_words
from .settings import Setting, Settings, shown_value

# Longer lines are not aligned.
_WIDE = 60


def effective_config(settings: Settings) -> str:
    """Return the effective options as lines of a --config file, each with its source."""
    missing = "".join(f"# {s.declared.name} is required\n" for s in settings.all if s.value is msgspec.NODEFAULT)
    present = [setting for setting in settings.all if setting.value is not msgspec.NODEFAULT]
    lines = [(f"{setting.declared.name} = {_toml(shown_value(setting))}", _origin(setting)) for setting in present]
    width = max((len(line) for line, _ in lines if len(line) < _WIDE), default=0)
    return missing + "".join(f"{line:<{width}}  # {origin}\n" for line, origin in lines)


def guide_table(program: Program) -> str:
    """Return the options of ``program`` as tables in Markdown, one per group."""
    groups: dict[str, list[str]] = {}
    for declared in program.options:
        cells = (
            f"`{declared.flag}`",
            f"`{declared.variable}`",
            declared.option.reader.kind,
            default_words(declared),
            declared.option.help,
        )
        groups.setdefault(declared.option.group, []).append(f"| {' | '.join(cells)} |\n")
    head = "| option | variable | value | default | does |\n|---|---|---|---|---|\n"
    return "\n".join(f"### {group[0].upper()}{group[1:]}\n\n{head}{''.join(rows)}" for group, rows in groups.items())


def _origin(setting: Setting) -> str:
    if setting.source:
        return setting.source
    words = setting.declared.option.default
    return f"default: {words}" if words else "default"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple) and value:
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int | float):
        return str(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) and value else f'"{NONE}"'
