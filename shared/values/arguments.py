"""Checks of the names of arguments, which callers misspell as often as values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import PenstockError, UnknownArgumentError
from .names import did_you_mean


def check_argument_names(owner: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise ``UnknownArgumentError`` for the first of ``names`` that is not one of the ``known`` ones.

    Args:
        owner: what takes the arguments, for the message.
    """
    known_names = sorted(known)
    unknown = sorted(set(names).difference(known_names))
    if unknown:
        hint = did_you_mean(unknown[0], known_names) or f"it has {', '.join(known_names)}"
        raise UnknownArgumentError(f"unknown argument {unknown[0]} of {owner}; {hint}")


class CheckedNames(msgspec.StructMeta):
    """Metaclass of structs that callers create: for an unknown field, the error names the nearest one."""

    # Type checkers take the arguments from the fields.
    if not TYPE_CHECKING:

        def __call__(cls, *values: Any, **fields: Any) -> Any:
            try:
                return super().__call__(*values, **fields)
            except TypeError as error:
                if not isinstance(error, PenstockError):
                    check_argument_names(cls.__name__, fields, cls.__struct_fields__)
                raise
