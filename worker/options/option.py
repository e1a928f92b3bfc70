"""An option: what a field of a configuration is to those who set it, declared in the field's annotation."""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from ...shared.errors import ConfigurationError
from ...shared.values.shown import shown
from .readers import Reader, RefusedValueError

# Says that an option is not given, where a source of higher rank takes back what one of lower rank gives.
NONE = "none"


@dataclass(frozen=True)
class Option:
    """Stands in the annotation of a field, whose name, type and default are the option's.

    Args:
        help: one sentence, without the default.
        reader: what values there are.
        name: of the option, where it is not the field's.
        default: in words, where the value does not say what it means.
        group: under which heading of the help it stands.
        is_secret: a value is not shown as it is.
    """

    help: str
    reader: Reader
    name: str = ""
    default: str = ""
    group: str = "engine"
    is_secret: bool = False


@dataclass(frozen=True)
class DeclaredOption:
    """An option with the field that it was declared for.

    Args:
        struct: the configuration that has the field.
        default: ``msgspec.NODEFAULT`` if the option has to be given.
    """

    option: Option
    struct: type[msgspec.Struct]
    field: str
    default: Any

    @property
    def name(self) -> str:
        """The key in a file: snake_case."""
        return self.option.name or self.field

    @property
    def flag(self) -> str:
        """As it is given on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"PENSTOCK_{self.name.upper()}"

    @property
    def is_required(self) -> bool:
        """Whether it has to be given."""
        return self.default is msgspec.NODEFAULT

    @property
    def may_be_none(self) -> bool:
        """Whether "none" is a value: that of an option which is not given."""
        return self.default is None or self.default in ("", ())


@functools.cache
def options_of(struct: type[msgspec.Struct]) -> tuple[DeclaredOption, ...]:
    """The options that are declared in a configuration, in its order."""
    return tuple(
        DeclaredOption(note, struct, name, default)
        for name, default, notes in _annotated(struct)
        for note in notes
        if isinstance(note, Option)
    )


def check_fields(config: msgspec.Struct) -> None:
    """Verify the bounds and choices of a configuration's fields; None is a value that was not given.

    Raises:
        ConfigurationError: one is out of its bounds; names the field and the bound.
    """
    for name, reader in _readers(type(config)).items():
        value = getattr(config, name)
        if value is None:
            continue
        try:
            reader.check(value)
        except RefusedValueError as error:
            raise ConfigurationError(complaint(name, error, value)) from None


def complaint(what: str, error: RefusedValueError, value: object) -> str:
    """The sentence about a value: what it belongs to, what it must be, what it is, and the remedy."""
    remedy = f"; {error.remedy}" if error.remedy else ""
    return f"{what} {error.words}, got {shown(value)}{remedy}"


@functools.cache
def _readers(struct: type[msgspec.Struct]) -> dict[str, Reader]:
    return {
        name: note.reader if isinstance(note, Option) else note
        for name, _, notes in _annotated(struct)
        for note in notes
        if isinstance(note, Option | Reader)
    }


def _annotated(struct: type[msgspec.Struct]) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Name, default and notes of each annotated field."""
    for field in msgspec.structs.fields(struct):
        if typing.get_origin(field.type) is typing.Annotated:
            _, *notes = typing.get_args(field.type)
            yield field.name, field.default, tuple(notes)
