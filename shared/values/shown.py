"""Shows callers' values in our messages, shortened to a readable length."""

from __future__ import annotations

import reprlib
from typing import Any

from ..errors import cut

# Names and ids, which have at most 200 characters, are shown whole.
MAX_SHOWN_CHARS = 240


def shown(value: object) -> str:
    """Return ``repr(value)``, of a large value its beginning and end; a list or dict is not gone through whole."""
    return cut(_repr.repr(value), MAX_SHOWN_CHARS)


class _Repr(reprlib.Repr):
    """Python's own, with more of a string and with integers that Python refuses to write in full."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 10
        self.maxstring = self.maxother = MAX_SHOWN_CHARS

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 256:
            return f"an integer of {x.bit_length()} bits"
        return repr(x)

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """In the caller's order; the base class sorts."""
        if not x or level <= 0:
            return "{...}" if x else "{}"
        items = [f"{self.repr1(key, level - 1)}: {self.repr1(x[key], level - 1)}" for key in list(x)[: self.maxdict]]
        return "{" + ", ".join(items + ["..."] * (len(x) > self.maxdict)) + "}"


_repr = _Repr()
