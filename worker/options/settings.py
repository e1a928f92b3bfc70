"""What is in effect: the command line before the environment, that before a file, that before the defaults.

Whatever is given is checked, even where something of higher rank is given as well.
"""

from __future__ import annotations

import argparse
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
from .program import CONFIG_VARIABLE, Program
from .readers import RefusedValueError

S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True)
class Setting:
    """The value of one option.

    Args:
        source: the flag, the variable, or the key and its file; empty for the default.
    """

    declared: DeclaredOption
    value: Any
    source: str = ""


class Settings:
    """All options of one program, with where each comes from."""

    def __init__(self, settings: Iterable[Setting]) -> None:
        self.all = tuple(settings)

    def fields_of(self, struct: type[msgspec.Struct]) -> dict[str, Any]:
        """Values by the fields of one configuration."""
        return {setting.declared.field: setting.value for setting in self.all if setting.declared.struct is struct}

    def make(self, struct: type[S]) -> S:
        """The configuration that all of its fields are options of."""
        return struct(**self.fields_of(struct))

    def require(self) -> None:
        """Verify that what has to be given is.

        Raises:
            UsageError: an option is missing; says how it can be given.
        """
        for setting in self.all:
            if setting.value is msgspec.NODEFAULT:
                option = setting.declared
                raise UsageError(
                    f"{option.flag} is missing; give it, or {option.variable}, or {option.name} in a --config file"
                )

    @contextmanager
    def naming_sources(self) -> Iterator[None]:
        """Options that contradict each other or the machine are known by their names: say where else they come from."""
        try:
            yield
        except ConfigurationError as error:
            raise ConfigurationError(self._with_sources(str(error))) from error
        except UsageError as error:
            raise UsageError(self._with_sources(str(error))) from error

    def _with_sources(self, sentence: str) -> str:
        named = set(re.findall(r"[a-z][a-z_]+", sentence.replace("-", "_")))
        elsewhere = [
            setting.source
            for setting in self.all
            if setting.source not in ("", setting.declared.flag)
            and not named.isdisjoint({setting.declared.name, setting.declared.field})
        ]
        return f"{sentence} (given: {', '.join(elsewhere)})" if elsewhere else sentence


def read_settings(
    program: Program, others: Iterable[Program], arguments: argparse.Namespace, environment: Mapping[str, str]
) -> Settings:
    """Find out what is in effect.

    Args:
        others: programs whose options a file may hold as well; they have no part in this one.
        arguments: of a parser that has ``program``'s.

    Raises:
        ConfigurationError: the file of a secret cannot be read.
        UsageError: a value is none of its option's kind or out of its bounds, or the file cannot be read or has an
            unknown key; names the source, the value and the remedy.
    """
    path = arguments.config or environment.get(CONFIG_VARIABLE)
    in_file = _read_file(path, (program, *others)) if path else {}
    return Settings(_settle(declared, arguments, environment, path, in_file) for declared in program.options)


def shown_value(setting: Setting) -> Any:
    """The value, without what nobody is to see."""
    return _fit_to_show(setting.declared, setting.value)


def _fit_to_show(declared: DeclaredOption, value: Any) -> Any:
    if isinstance(value, str) and "://" in value:
        # Any URL may have a password. The one of Redis is a list of one.
        return mask_shards(value)
    return type(value).__name__ if declared.option.is_secret and value is not None else value


def _settle(
    declared: DeclaredOption,
    arguments: argparse.Namespace,
    environment: Mapping[str, str],
    path: str | None,
    in_file: Mapping[str, Any],
) -> Setting:
    """From the source of lowest rank to that of highest, so that each is checked and the last one stays."""
    setting = Setting(declared, declared.default)
    if declared.name in in_file:
        source = f"{declared.name} in {path}"
        setting = Setting(declared, _value(declared, source, in_file[declared.name], is_words=False), source)
    # Who cannot unset a variable sets it to nothing.
    variable = declared.variable
    words = variable_or_file(variable, environment) if declared.option.is_secret else environment.get(variable)
    if words:
        setting = Setting(declared, _value(declared, variable, words), variable)
    given = getattr(arguments, declared.name)
    if given is not None:
        words = ",".join(given) if isinstance(given, list) else given
        is_words = not isinstance(given, bool)
        setting = Setting(declared, _value(declared, declared.flag, words, is_words=is_words), declared.flag)
    return setting


def _value(declared: DeclaredOption, source: str, given: Any, *, is_words: bool = True) -> Any:
    if given == NONE and declared.may_be_none:
        return declared.default
    value, reader = given, declared.option.reader
    try:
        value = reader.read(given) if is_words else reader.take(given)
        reader.check(value)
    except RefusedValueError as error:
        raise UsageError(complaint(source, error, _fit_to_show(declared, value))) from None
    return value


def _read_file(path: str, programs: Iterable[Program]) -> dict[str, Any]:
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is no TOML file: {error}") from error
    known = {declared.name for program in programs for declared in program.options}
    for key in content:
        if key not in known:
            remedy = did_you_mean(key.replace("-", "_"), known) or "ops/guide/configuration.md has all keys"
            raise UsageError(f"unknown key {key} in {path}; {remedy}")
    return content
