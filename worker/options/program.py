"""The options of one program, and its command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from .option import DeclaredOption, options_of

CONFIG_VARIABLE = "PENSTOCK_CONFIG"
_EPILOG = (
    f"Every option can also be an environment variable, PENSTOCK_MAX_NUM_SEQS=8, or a line of a TOML file, "
    f"max_num_seqs = 8, that --config or {CONFIG_VARIABLE} names. The command line wins over the environment, that "
    f"over the file. ops/guide/reference/configuration.md has them all."
)


@dataclass(frozen=True)
class Program:
    """A program and the configurations that its options define.

    Args:
        defaults: option, value and description of each default that differs from the declared one.
    """

    name: str
    structs: tuple[type[msgspec.Struct], ...]
    defaults: tuple[tuple[str, Any, str], ...] = ()

    @property
    def options(self) -> tuple[DeclaredOption, ...]:
        """All options of the program."""
        changed = {name: (value, words) for name, value, words in self.defaults}
        return tuple(
            _with_default(declared, *changed[declared.name]) if declared.name in changed else declared
            for struct in self.structs
            for declared in options_of(struct)
        )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add all options to ``parser``. None is required here, because other sources may set it."""
        parser.epilog = _EPILOG
        parser.add_argument("--config", metavar="FILE", help="TOML file with options; the command line wins")
        parser.add_argument(
            "--show-config", action="store_true", help="print what is in effect and where it comes from, and end"
        )
        groups: dict[str, argparse._ArgumentGroup] = {}
        for declared in self.options:
            heading = declared.option.group
            if heading not in groups:
                groups[heading] = parser.add_argument_group(heading)
            declared.option.reader.add_arguments(
                groups[heading], declared.flag, dest=declared.name, default=None, help=_help(declared)
            )


def default_words(declared: DeclaredOption) -> str:
    """Return a description of the default for people."""
    if declared.is_required:
        return "required"
    if declared.option.default:
        return declared.option.default
    if declared.may_be_none:
        return "none"
    if isinstance(declared.default, bool):
        return "yes" if declared.default else "no"
    return f"{declared.default:g}" if isinstance(declared.default, float) else str(declared.default)


def _with_default(declared: DeclaredOption, value: Any, words: str) -> DeclaredOption:
    return replace(declared, default=value, option=replace(declared.option, default=words))


def _help(declared: DeclaredOption) -> str:
    return f"{declared.option.help} ({default_words(declared)})".replace("%", "%%")
