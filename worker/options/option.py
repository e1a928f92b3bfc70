"""An option of a program, declared in the annotation of a configuration's field, and groups of them.

A msgspec struct can have only one base with fields. So groups are not structs: the metaclass of a configuration copies
the fields that they declare, in the order of its bases. Their properties are inherited as in any class.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, dataclass_transform, get_type_hints

import msgspec

from ...shared.errors import ConfigurationError
from ...shared.values.shown import shown
from .readers import Reader, RefusedValueError

# Value that unsets an option, so that a source of higher rank can override one of lower rank.
NONE = "none"


@dataclass(frozen=True)
class Option:
    """Annotation of a field. The option has the field's name, type and default.

    Args:
        help: one sentence, without the default.
        reader: reader of its values.
        name: name of the option; empty for the field's.
        default: description of the default, if its value does not explain itself.
        group: heading of the help that lists it.
        is_secret: whether its value is masked when displayed.
    """

    help: str
    reader: Reader
    name: str = ""
    default: str = ""
    group: str = "engine"
    is_secret: bool = False


@dataclass(frozen=True)
class DeclaredOption:
    """An option with the field for which it is declared.

    Args:
        struct: configuration that has the field.
        default: default value; ``msgspec.NODEFAULT`` if the option is required.
    """

    option: Option
    struct: type[msgspec.Struct]
    field: str
    default: Any

    @property
    def name(self) -> str:
        """Key of the option in a file, in snake_case."""
        return self.option.name or self.field

    @property
    def flag(self) -> str:
        """Name on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        """Name of its environment variable."""
        return f"PENSTOCK_{self.name.upper()}"

    @property
    def is_required(self) -> bool:
        """Whether the option is required."""
        return self.default is msgspec.NODEFAULT

    @property
    def may_be_none(self) -> bool:
        """Whether "none" is a valid value, which unsets the option."""
        return self.default is None or self.default in ("", ())


@functools.cache
def options_of(struct: type[msgspec.Struct]) -> tuple[DeclaredOption, ...]:
    """Return the options that a configuration declares, in order."""
    return tuple(
        DeclaredOption(note, struct, name, default)
        for name, default, notes in _annotated(struct)
        for note in notes
        if isinstance(note, Option)
    )


def check_fields(config: msgspec.Struct) -> None:
    """Check the bounds and choices of a configuration's fields; None is an unset value.

    Raises:
        ConfigurationError: a value is out of bounds; names the field and the bound.
    """
    for name, reader in _readers(type(config)).items():
        value = getattr(config, name)
        if value is None:
            continue
        try:
            reader.check(value)
        except RefusedValueError as error:
            raise ConfigurationError(complaint(name, error, value)) from None


def complaint(subject: str, error: RefusedValueError, value: object) -> str:
    """Return the message about a refused value: subject, requirement, value, and remedy."""
    remedy = f"; {error.remedy}" if error.remedy else ""
    return f"{subject} {error.words}, got {shown(value)}{remedy}"


@functools.cache
def _readers(struct: type[msgspec.Struct]) -> dict[str, Reader]:
    return {
        name: note.reader if isinstance(note, Option) else note
        for name, _, notes in _annotated(struct)
        for note in notes
        if isinstance(note, Option | Reader)
    }


def _annotated(struct: type[msgspec.Struct]) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yield name, default and annotations of each annotated field."""
    for field in msgspec.structs.fields(struct):
        if typing.get_origin(field.type) is typing.Annotated:
            _, *notes = typing.get_args(field.type)
            yield field.name, field.default, tuple(notes)


@dataclass_transform(kw_only_default=True, frozen_default=True)
class _GroupMeta(type):
    """Metaclass of groups, which are never instantiated."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **settings: Any) -> _GroupMeta:
        # Without slots, because all fields belong to the configuration.
        return super().__new__(cls, name, bases, {"__slots__": (), **namespace}, **settings)


class OptionGroup(metaclass=_GroupMeta):
    """Base of groups. Fields of a group are declared as those of a struct, and define its options."""


class OptionGroupMeta(_GroupMeta, msgspec.StructMeta):
    """The metaclass of a configuration whose bases are groups and, last, ``msgspec.Struct``."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **settings: Any) -> OptionGroupMeta:
        groups = [base for base in bases if issubclass(base, OptionGroup)]
        # Resolve annotations here, because their names belong to the files of the groups.
        types = {field: kind for group in groups for field, kind in get_type_hints(group, include_extras=True).items()}
        defaults = {field: vars(group)[field] for group in groups for field in types if field in vars(group)}
        annotations = {**types, **namespace.get("__annotations__", {})}
        whole = {**namespace, **defaults, "__annotations__": annotations}
        return msgspec.StructMeta.__new__(cls, name, bases, whole, **settings)
