"""Effective options: the command line overrides the environment, which overrides a file, which overrides defaults.

Every value is checked, even if a source of higher rank overrides it. The effective options can be shown, and so can
the guide's tables.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ...shared.errors import ConfigurationError
from ...shared.process.command_line import UsageError
from ...shared.process.secret_files import variable_or_file
from ...shared.shards.addresses import mask_shards
from ...shared.values.names import did_you_mean
from .option import NONE, DeclaredOption, complaint
from .program import CONFIG_VARIABLE, Program, default_words
from .readers import RefusedValueError

S = TypeVar("S", bound=msgspec.Struct)
# Longer lines are not aligned.
_WIDE = 60


@dataclass(frozen=True)
class Setting:
    """The value of one option.

    Args:
        source: flag, variable, or key and file; empty for the default.
    """

    declared: DeclaredOption
    value: Any
    source: str = ""

    @property
    def is_from_caller(self) -> bool:
        """Whether the command line or an environment variable set it."""
        return self.source in (self.declared.flag, self.declared.variable)


class Settings:
    """Values of all options of one program, with their sources."""

    def __init__(self, settings: Iterable[Setting]) -> None:
        self.all = tuple(settings)

    def fields_of(self, struct: type[msgspec.Struct]) -> dict[str, Any]:
        """Return the values of one configuration, by field."""
        return {setting.declared.field: setting.value for setting in self.all if setting.declared.struct is struct}

    def make(self, struct: type[S]) -> S:
        """Return a configuration, all of whose fields are options."""
        return struct(**self.fields_of(struct))

    def with_table(self, table: Mapping[str, Any], place: str, *, is_default: bool = False) -> Settings:
        """Return the settings with the values of a TOML table.

        Args:
            table: values by name of the option; the options must exist.
            place: description of the table, for sources.
            is_default: whether the command line and environment variables override the values.

        Raises:
            UsageError: an option is unknown, or a value is not of its kind.
        """
        names = {setting.declared.name for setting in self.all}
        for key in table:
            if key not in names:
                remedy = did_you_mean(key.replace("-", "_"), names) or "see ops/guide/serving/several_models.md"
                raise UsageError(f"unknown key {key} in {place}; {remedy}")
        return Settings(
            Setting(one.declared, _value(one.declared, source, table[one.declared.name], is_words=False), source)
            if one.declared.name in table and not (is_default and one.is_from_caller)
            else one
            for one in self.all
            for source in [f"{one.declared.name} in {place}"]
        )

    def require(self) -> None:
        """Check that all required options are set.

        Raises:
            UsageError: an option is missing; names the ways to set it.
        """
        for setting in self.all:
            if setting.value is msgspec.NODEFAULT:
                option = setting.declared
                raise UsageError(
                    f"{option.flag} is missing; give it, or {option.variable}, or {option.name} in a --config file"
                )

    @contextmanager
    def naming_sources(self) -> Iterator[None]:
        """Add to errors in the block the sources of the options that they name."""
        try:
            yield
        except ConfigurationError as error:
            raise ConfigurationError(self._with_sources(str(error))) from error
        except UsageError as error:
            raise UsageError(self._with_sources(str(error))) from error

    def _with_sources(self, sentence: str) -> str:
        words = set(re.findall(r"[a-z][a-z_]+", sentence.replace("-", "_")))
        sources = [
            setting.source
            for setting in self.all
            if setting.source not in ("", setting.declared.flag)
            and not words.isdisjoint({setting.declared.name, setting.declared.field})
        ]
        return f"{sentence} (given: {', '.join(sources)})" if sources else sentence


def read_settings(
    program: Program, others: Iterable[Program], arguments: argparse.Namespace, environment: Mapping[str, str]
) -> Settings:
    """Read all sources and return the effective options.

    Args:
        others: programs whose options the file may contain too; they are ignored.
        arguments: result of a parser that has the arguments of ``program``.

    Raises:
        ConfigurationError: the file of a secret cannot be read.
        UsageError: a value is not of its option's kind or out of bounds, or the file cannot be read or has an unknown
            key; names the source, the value and the remedy.
    """
    path = arguments.config or environment.get(CONFIG_VARIABLE)
    in_file = _read_file(path, (program, *others)) if path else {}
    return Settings(_read_setting(declared, arguments, environment, path, in_file) for declared in program.options)


def shown_value(setting: Setting) -> Any:
    """Return the value for display, with secrets masked."""
    return _masked(setting.declared, setting.value)


def _masked(declared: DeclaredOption, value: Any) -> Any:
    if isinstance(value, str) and "://" in value:
        # Any URL may have a password. The URL of Redis is a list with one item.
        return mask_shards(value)
    return type(value).__name__ if declared.option.is_secret and value is not None else value


def _read_setting(
    declared: DeclaredOption,
    arguments: argparse.Namespace,
    environment: Mapping[str, str],
    path: str | None,
    in_file: Mapping[str, Any],
) -> Setting:
    """Read an option from the source of lowest rank to that of highest: each is checked, and the last one wins."""
    setting = Setting(declared, declared.default)
    if declared.name in in_file:
        source = f"{declared.name} in {path}"
        setting = Setting(declared, _value(declared, source, in_file[declared.name], is_words=False), source)
    # An empty variable counts as unset, because some environments cannot unset one.
    variable = declared.variable
    words = variable_or_file(variable, environment) if declared.option.is_secret else environment.get(variable)
    if words:
        setting = Setting(declared, _value(declared, variable, words), variable)
    argument = getattr(arguments, declared.name)
    if argument is not None:
        words = declared.option.reader.joined(argument) if isinstance(argument, list) else argument
        is_words = not isinstance(argument, bool)
        setting = Setting(declared, _value(declared, declared.flag, words, is_words=is_words), declared.flag)
    return setting


def _value(declared: DeclaredOption, source: str, raw_value: Any, *, is_words: bool = True) -> Any:
    if raw_value == NONE and declared.may_be_none:
        return declared.default
    value, reader = raw_value, declared.option.reader
    try:
        value = reader.read(raw_value) if is_words else reader.read_toml(raw_value)
        reader.check(value)
    except RefusedValueError as error:
        raise UsageError(complaint(source, error, _masked(declared, value))) from None
    return value


def _read_file(path: str, programs: Iterable[Program]) -> dict[str, Any]:
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not a TOML file: {error}") from error
    names = {declared.name for program in programs for declared in program.options}
    for key in content:
        if key not in names:
            remedy = did_you_mean(key.replace("-", "_"), names) or "ops/guide/reference/configuration.md has all keys"
            raise UsageError(f"unknown key {key} in {path}; {remedy}")
    return content


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
    if isinstance(value, dict) and value:
        return f"{{ {', '.join(f'{json.dumps(key)} = {number:g}' for key, number in value.items())} }}"
    if isinstance(value, tuple) and value:
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int | float):
        return str(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) and value else f'"{NONE}"'
