"""Configurations composed of groups of options; each group is a small class in a separate file.

A msgspec struct can have only one base with fields. So groups are not structs: the metaclass of a configuration copies
the fields that they declare, in the order of its bases. Their properties are inherited as in any class.
"""

from __future__ import annotations

from typing import Any, dataclass_transform, get_type_hints

import msgspec


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
