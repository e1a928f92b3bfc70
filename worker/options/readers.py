"""Readers of option values, from text or from TOML.

Text comes from the command line or an environment variable; TOML has its own numbers and booleans.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from ...shared.errors import ValidationError
from ...shared.values.names import check_name, did_you_mean

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class RefusedValueError(ValueError):
    """A value is not of the required kind, or out of bounds.

    Args:
        words: the requirement, as in "must be at least 1".
        remedy: the value to use instead, if the requirement does not say it.
    """

    def __init__(self, words: str, remedy: str = "") -> None:
        super().__init__(words)
        self.words = words
        self.remedy = remedy


class Reader:
    """Reader of any text. Subclasses read other kinds of values.

    Attributes:
        metavar: name of a value in the help.
        kind: description of the values, for the guide.
    """

    metavar = "TEXT"
    kind = "text"

    def __init__(self, metavar: str = "") -> None:
        self.metavar = metavar or self.metavar

    def read(self, text: str) -> Any:
        """Return the value of ``text``.

        Raises:
            RefusedValueError: the value is not of this kind.
        """
        return text

    def read_toml(self, value: Any) -> Any:
        """Return the value of a TOML value.

        Raises:
            RefusedValueError: the value is not of this kind.
        """
        if not isinstance(value, str):
            raise RefusedValueError("must be a string")
        return self.read(value)

    def check(self, value: Any) -> None:
        """Check the bounds of a value that was read.

        Raises:
            RefusedValueError: the value is out of bounds.
        """

    def joined(self, texts: list[str]) -> str:
        """Return the text of an option that was given several times: the last one."""
        return texts[-1]

    def add_arguments(self, group: argparse._ArgumentGroup, flag: str, **described: Any) -> None:
        """Add the option to a parser, which returns a text, a bool, or a list of texts."""
        group.add_argument(flag, metavar=self.metavar, **described)


class Folder(Reader):
    """A folder, converted to an absolute path; an empty text stays empty."""

    metavar, kind = "DIR", "folder"

    def read(self, text: str) -> str:
        return os.path.abspath(text) if text else ""


class Name(Reader):
    """A name that becomes part of a Redis key and of ids that people type."""

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
        return os.path.abspath(text) if os.path.exists(text) else text

    def add_arguments(self, group: argparse._ArgumentGroup, flag: str, **described: Any) -> None:
        # ``worker start`` serves all of them; for other programs the last one counts.
        group.add_argument(flag, metavar=self.metavar, action="append", **described)


class Choice(Reader):
    """Choice of a word from several."""

    def __init__(self, *values: str) -> None:
        super().__init__("{" + ",".join(values) + "}")
        self.values = values
        self.kind = ", ".join(f"`{value}`" for value in values)

    def check(self, value: str) -> None:
        if value not in self.values:
            raise RefusedValueError(f"must be one of {', '.join(self.values)}", did_you_mean(value, self.values))


class ChoiceWithCount(Choice):
    """Choice of a word from several. Those in ``counted`` may be followed by a colon and a number up to ``most``."""

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
            raise RefusedValueError(f"must have a whole number in [1, {self.most}] after the colon")


class Switch(Reader):
    """Yes or no; on the command line ``--option`` and ``--no-option``."""

    kind = "yes, no"

    def read(self, text: str) -> bool:
        if text.lower() not in (*TRUE, *FALSE):
            raise RefusedValueError(f"must be yes or no ({', '.join((*TRUE[:2], *FALSE[:2]))})")
        return text.lower() in TRUE

    def read_toml(self, value: Any) -> bool:
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

    def read_toml(self, value: Any) -> bool | str:
        return self.read(value) if isinstance(value, str) else Switch().read_toml(value)

    def add_arguments(self, group: argparse._ArgumentGroup, flag: str, **described: Any) -> None:
        group.add_argument(flag, metavar=self.metavar, nargs="?", const=True, **described)
        dest = described["dest"]
        group.add_argument(f"--no-{flag.removeprefix('--')}", action="store_false", dest=dest, default=None)


class Texts(Reader):
    """Several texts: an option given several times, a text with commas, a list in TOML."""

    kind = "text, may be repeated"

    def read(self, text: str) -> tuple[str, ...]:
        return tuple(part for part in map(str.strip, text.split(",")) if part)

    def read_toml(self, value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            return self.read(value)
        if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
            raise RefusedValueError("must be a list of strings")
        return tuple(value)

    def joined(self, texts: list[str]) -> str:
        return ",".join(texts)

    def add_arguments(self, group: argparse._ArgumentGroup, flag: str, **described: Any) -> None:
        group.add_argument(flag, metavar=self.metavar, action="append", **described)


class BandSeconds(Reader):
    """Seconds of bands of the queue: "interactive=1,batch=120", or a table in TOML."""

    metavar, kind = "BAND=S,…", "seconds by band such as `batch=120`"

    def read(self, text: str) -> dict[str, float]:
        pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
        try:
            return {band.strip(): float(value) for band, _, value in pairs}
        except ValueError:
            raise RefusedValueError("must be seconds by band such as interactive=1,batch=120") from None

    def read_toml(self, value: Any) -> dict[str, float]:
        if isinstance(value, str):
            return self.read(value)
        numbers = isinstance(value, dict) and not any(
            isinstance(each, bool) or not isinstance(each, int | float) for each in value.values()
        )
        if not numbers:
            raise RefusedValueError("must be a table of seconds by band such as { batch = 120 }")
        return {str(band): float(each) for band, each in value.items()}

    def check(self, value: dict[str, float]) -> None:
        for band, seconds in value.items():
            if not band or not 0 < seconds <= 10**9:
                raise RefusedValueError("must have seconds above 0 for each band")


class Indices(Reader):
    """Distinct numbers from 0 on: "0,1", or a list in TOML."""

    metavar, kind = "0,1", "indices such as `0,1`"

    def read(self, text: str) -> tuple[int, ...]:
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdecimal() for part in parts):
            raise RefusedValueError("must be indices such as 0,1")
        return tuple(map(int, parts))

    def read_toml(self, value: Any) -> tuple[int, ...]:
        if isinstance(value, str):
            return self.read(value)
        parts = value if isinstance(value, list) else [value]
        if not parts or not all(isinstance(part, int) and not isinstance(part, bool) and part >= 0 for part in parts):
            raise RefusedValueError("must be a list of indices such as [0, 1]")
        return tuple(parts)

    def check(self, value: tuple[int, ...]) -> None:
        if len(set(value)) != len(value):
            raise RefusedValueError("must name each once")
