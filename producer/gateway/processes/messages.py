"""What parent and child say to each other: lines of JSON over a socket pair, whose end is the end of the other."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from ..figures import Family
from ..settings import GatewaySettings

# The figures of all routes are some tens of KiB.
MAX_LINE_BYTES = 1 << 24

T = TypeVar("T")


class Begin(msgspec.Struct, frozen=True, tag=True):
    """To a child, first: how it serves. Secrets are in it; so it is no argument and no environment of a process."""

    settings: GatewaySettings
    log_level: str
    log_format: str
    process: int
    """Its number, from 0; the one that takes its place has it, too."""


class Tell(msgspec.Struct, frozen=True, tag=True):
    """To a child: what are your figures now?"""

    asked: int


class Told(msgspec.Struct, frozen=True, tag=True):
    """To a child: the figures of all, as it asked for."""

    asked: int
    families: list[Family]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """To the parent: this child serves."""


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """To the parent: why this child does not serve; it ends."""

    message: str


class Figures(msgspec.Struct, frozen=True, tag=True):
    """To the parent, every second and when asked: what this child has counted. ``asked`` 0 is of itself."""

    families: list[Family]
    asked: int = 0


class AskAll(msgspec.Struct, frozen=True, tag=True):
    """To the parent: what are the figures of all? Those of the child that asks come along."""

    asked: int
    families: list[Family]


ToChild = Begin | Tell | Told
ToParent = Ready | NotStarted | Figures | AskAll

_to_child = msgspec.json.Decoder(ToChild)
_to_parent = msgspec.json.Decoder(ToParent)


async def read_to_child(reader: asyncio.StreamReader) -> ToChild | None:
    """Return the next message; None at the end of the parent."""
    return await _read(reader, _to_child)


async def read_to_parent(reader: asyncio.StreamReader) -> ToParent | None:
    """Return the next message; None at the end of the child."""
    return await _read(reader, _to_parent)


def write(writer: asyncio.StreamWriter, message: ToChild | ToParent) -> None:
    """Send a message; to one that has ended it is lost."""
    writer.write(msgspec.json.encode(message) + b"\n")


async def _read(reader: asyncio.StreamReader, decoder: msgspec.json.Decoder[T]) -> T | None:
    try:
        line = await reader.readline()
    except ConnectionError:
        return None
    # The last line of one that was killed may be torn.
    return decoder.decode(line) if line.endswith(b"\n") else None
