"""A configuration in groups of options: each a small class in a file of its own, and the configuration a list of them.

A struct of msgspec has one base with fields at most. So groups are no structs: a configuration takes the fields that
they declare for its own, in the order of its bases, and their properties as any class does.
"""

from __future__ import annotations

from typing import Any, dataclass_transform, get_type_hints

import msgspec


@dataclass_transform(kw_only_default=True, frozen_default=True)
class _OfGroups(type):
    """Makes groups, which are never made into objects of their own."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **settings: Any) -> _OfGroups:
        # Without slots of their own: all fields are those of the configuration.
        return super().__new__(cls, name, bases, {"__slots__": (), **namespace}, **settings)


class OptionGroup(metaclass=_OfGroups):
    """The base of groups. A group's fields are declared as a struct's are, and say what its options are."""


class FromGroups(_OfGroups, msgspec.StructMeta):
    """The metaclass of a configuration whose bases are groups and, last, ``msgspec.Struct``."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **settings: Any) -> FromGroups:
        groups = [base for base in bases if issubclass(base, OptionGroup)]
        # With what their annotations mean: the names in them are those of the groups' own files.
        types = {field: kind for group in groups for field, kind in get_type_hints(group, include_extras=True).items()}
        defaults = {field: vars(group)[field] for group in groups for field in types if field in vars(group)}
        annotations = {**types, **namespace.get("__annotations__", {})}
        whole = {**namespace, **defaults, "__annotations__": annotations}
        return msgspec.StructMeta.__new__(cls, name, bases, whole, **settings)
