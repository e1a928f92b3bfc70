"""What an option's value may be, read from words or taken from TOML.

Words are those of the command line or of an environment variable; in TOML numbers and switches are its own.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

from ...shared.command_line import did_you_mean
from ...shared.errors import ValidationError
from ...shared.names import check_name

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

_MAX_SIZE_CHARS = 40
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b)?", re.IGNORECASE)


class RefusedValueError(ValueError):
    """A value is none of this kind, or out of bounds.

    Args:
        words: what it must be, as in "must be at least 1".
        remedy: what to give instead, where the words do not say it.
    """

    def __init__(self, words: str, remedy: str = "") -> None:
        super().__init__(words)
        self.words = words
        self.remedy = remedy


class Reader:
    """Any text. Its subclasses are the other kinds.

    Attributes:
        metavar: how the help calls a value.
        kind: the values in words, for the guide.
    """

    metavar = "TEXT"
    kind = "text"

    def __init__(self, metavar: str = "") -> None:
        self.metavar = metavar or self.metavar

    def read(self, text: str) -> Any:
        """Return the value that words stand for.

        Raises:
            RefusedValueError: they are none of this kind.
        """
        return text

    def take(self, value: Any) -> Any:
        """Return the value that TOML's stands for.

        Raises:
            RefusedValueError: it is none of this kind.
        """
        if not isinstance(value, str):
            raise RefusedValueError("must be a string")
        return self.read(value)

    def check(self, value: Any) -> None:
        """Verify the bounds of a value that has been read.

        Raises:
            RefusedValueError: it is beyond them.
        """

    def add_arguments(self, group: argparse._ArgumentGroup, flag: str, **described: Any) -> None:
        """Add the option to a parser; what it was given as comes out as words, a bool, or a list of words."""
        group.add_argument(flag, metavar=self.metavar, **described)


class Folder(Reader):
    """A folder, which from then on does not depend on the working directory; none stays none."""

    metavar, kind = "DIR", "folder"

    def read(self, text: str) -> str:
        return os.path.abspath(text) if text else ""


class Name(Reader):
    """What becomes part of a key in Redis, and of ids that people type."""

    metavar = "NAME"

    def check(self, value: Any) -> None:
        try:
            check_name("it", value)
        except ValidationError as error:
            raise RefusedValueError(str(error).partition(", got")[0].removeprefix("it ")) from error


class Model(Reader):
    """A folder, a GGUF file, or a name on the model hub."""

    metavar, kind = "PATH_OR_NAME", "folder, file or name"

    def read(self, text: str) -> str:
        return os.path.abspath(text) if Path(text).exists() else text


class Choice(Reader):
    """One of some words."""

    def __init__(self, *values: str) -> None:
        super().__init__("{" + ",".join(values) + "}")
        self.values = values
        self.kind = ", ".join(f"`{value}`" for value in values)

    def check(self, value: str) -> None:
        if value not in self.values:
            raise RefusedValueError(f"must be one of {', '.join(self.values)}", did_you_mean(value, self.values))


class ChoiceWithCount(Choice):
    """One of some words, and behind those ``counted`` maybe a colon and a whole number from 1 to ``most``."""

    def __init__(self, *values: str, counted: tuple[str, ...], most: int) -> None:
        super().__init__(*values)
        self.counted, self.most = counted, most
        self.metavar = "{" + ",".join(f"{value}[:N]" if value in counted else value for value in values) + "}"
        self.kind = ", ".join(f"`{value}[:N]`" if value in counted else f"`{value}`" for value in values)

    def check(self, value: str) -> None:
        word, colon, count = value.partition(":")
        super().check(word)
        if not colon:
            return
        if word not in self.counted:
            raise RefusedValueError(f"must be {word!r} without a number")
        if not (count.isascii() and count.isdigit() and 1 <= int(count) <= self.most):
            raise RefusedValueError(f"must have a whole number in [1, {self.most}] behind the colon")


class Switch(Reader):
    """Yes or no; on the command line ``--option`` and ``--no-option``."""

    kind = "yes, no"

    def read(self, text: str) -> bool:
        if text.lower() not in (*TRUE, *FALSE):
            raise RefusedValueError(f"must be yes or no ({', '.join((*TRUE[:2], *FALSE[:2]))})")
        return text.lower() in TRUE

    def take(self, value: Any) -> bool:
        if not isinstance(value, bool):
            raise RefusedValueError("must be true or false, without quotes")
        return value

    def add_arguments(self, group: argparse._ArgumentGroup, flag: str, **described: Any) -> None:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **described)


class SwitchOrText(Reader):
    """Yes, no, or yes by naming something."""

    def __init__(self, metavar: str) -> None:
        super().__init__(metavar)
        self.kind = f"yes, no, {metavar.lower()}"

    def read(self, text: str) -> bool | str:
        return Switch().read(text) if text.lower() in (*TRUE, *FALSE) else text

    def take(self, value: Any) -> bool | str:
        return self.read(value) if isinstance(value, str) else Switch().take(value)

    def add_arguments(self, group: argparse._ArgumentGroup, flag: str, **described: Any) -> None:
        group.add_argument(flag, metavar=self.metavar, nargs="?", const=True, **described)
        dest = described["dest"]
        group.add_argument(f"--no-{flag.removeprefix('--')}", action="store_false", dest=dest, default=None)


class Number(Reader):
    """A number within bounds.

    Args:
        why: the reason for the bounds, or what a bound means.
    """

    metavar, kind = "X", "number"

    def __init__(self, least: float, most: float, why: str = "", metavar: str = "") -> None:
        super().__init__(metavar)
        self.least, self.most, self.why = least, most, why
        self.kind = f"{self.kind}, {least:,} to {most:,}"

    def read(self, text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise RefusedValueError("must be a number") from None

    def take(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RefusedValueError("must be a number, without quotes")
        # An integer beyond the bounds may be beyond all floats.
        self.check(value)
        return float(value)

    def check(self, value: float) -> None:
        # Written so that NaN, which no comparison holds for, is refused as well.
        if not self.least <= value <= self.most:
            bound = f"at most {self.most:,}" if value > self.most else f"at least {self.least:,}"
            raise RefusedValueError(f"must be {bound}", self.why)


class Seconds(Number):
    """A time in seconds."""

    metavar, kind = "S", "seconds"

    def __init__(self, least: float, why: str = "") -> None:
        # More no deployment means.
        super().__init__(least, 10**9, why)
        self.kind = f"seconds, at least {least:,}"


class Share(Number):
    """More than nothing, and at most all."""

    def __init__(self) -> None:
        super().__init__(0, 1, metavar="SHARE")
        self.kind = "share, above 0 to 1"

    def check(self, value: float) -> None:
        if not 0 < value <= 1:
            raise RefusedValueError("must be in (0, 1]")


class Integer(Number):
    """A whole number within bounds."""

    metavar, kind = "N", "whole number"

    def read(self, text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise RefusedValueError("must be a whole number") from None

    def take(self, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise RefusedValueError("must be a whole number, without quotes")
        return value


class Size(Integer):
    """Bytes: "2GiB", "512M" (binary, as memory is), "1.5GB" (decimal when written so), or their number."""

    metavar, kind = "2GiB", "size"

    def __init__(self, least: int, most: int) -> None:
        super().__init__(least, most, "in bytes")
        self.kind = "size such as `2GiB`"

    def read(self, text: str) -> int:
        found = _BYTES.fullmatch(text.strip())
        if not found or len(text) > _MAX_SIZE_CHARS:
            raise RefusedValueError("must be a size such as 2GiB or 512MiB")
        number, prefix, binary = found[1], (found[2] or "").lower(), found[3]
        decimal = bool(prefix) and not binary and text.strip().lower().endswith("b")
        return int(float(number) * (1000 if decimal else 1024) ** " kmgt".index(prefix or " "))

    def take(self, value: Any) -> int:
        if isinstance(value, str):
            return self.read(value)
        try:
            return super().take(value)
        except RefusedValueError:
            raise RefusedValueError('must be a size such as "2GiB", or a number of bytes') from None


class Texts(Reader):
    """Several texts: an option given several times, words with commas, a list in TOML."""

    kind = "text, or several"

    def read(self, text: str) -> tuple[str, ...]:
        return tuple(part for part in map(str.strip, text.split(",")) if part)

    def take(self, value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            return self.read(value)
        if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
            raise RefusedValueError("must be a list of strings")
        return tuple(value)

    def add_arguments(self, group: argparse._ArgumentGroup, flag: str, **described: Any) -> None:
        group.add_argument(flag, metavar=self.metavar, action="append", **described)


class Indices(Reader):
    """Numbers from 0 on, each once: "0,1", a list in TOML."""

    metavar, kind = "0,1", "indices such as `0,1`"

    def read(self, text: str) -> tuple[int, ...]:
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdecimal() for part in parts):
            raise RefusedValueError("must be indices such as 0,1")
        return tuple(map(int, parts))

    def take(self, value: Any) -> tuple[int, ...]:
        if isinstance(value, str):
            return self.read(value)
        parts = value if isinstance(value, list) else [value]
        if not parts or not all(isinstance(part, int) and not isinstance(part, bool) and part >= 0 for part in parts):
            raise RefusedValueError("must be a list of indices such as [0, 1]")
        return tuple(parts)

    def check(self, value: tuple[int, ...]) -> None:
        if len(set(value)) != len(value):
            raise RefusedValueError("must name each once")
