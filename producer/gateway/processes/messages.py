"""Messages between parent and child: lines of JSON over a socket pair, which ends when either process does."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from ..metrics import Family
from ..settings import GatewaySettings

# The metrics of all routes have some tens of KiB.
MAX_LINE_BYTES = 1 << 24

T = TypeVar("T")


class Begin(msgspec.Struct, frozen=True, tag=True):
    """First message to a child: how to serve. It contains secrets, so it is not passed as arguments or environment."""

    settings: GatewaySettings
    log_level: str
    log_format: str
    process: int
    """Number of the child, from 0; its replacement has the same number."""


class CollectMetrics(msgspec.Struct, frozen=True, tag=True):
    """Message to a child: report your metrics."""

    query_id: int


class MergedMetrics(msgspec.Struct, frozen=True, tag=True):
    """Message to a child: the metrics of all processes, as it requested."""

    query_id: int
    families: list[Family]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Message to the parent: this child serves."""


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """Message to the parent: why this child cannot serve; it exits."""

    message: str


class ChildMetrics(msgspec.Struct, frozen=True, tag=True):
    """Message to the parent, every second and on request: the metrics of this child. ``query_id`` is 0 without a
    request."""

    families: list[Family]
    query_id: int = 0


class QueryAllMetrics(msgspec.Struct, frozen=True, tag=True):
    """Message to the parent: a request for the metrics of all processes. It includes those of the child that requests
    them."""

    query_id: int
    families: list[Family]


FromParent = Begin | CollectMetrics | MergedMetrics
FromChild = Ready | NotStarted | ChildMetrics | QueryAllMetrics

_parent_decoder = msgspec.json.Decoder(FromParent)
_child_decoder = msgspec.json.Decoder(FromChild)


async def read_from_parent(reader: asyncio.StreamReader) -> FromParent | None:
    """Return the next message; None if the parent has exited."""
    return await _read_message(reader, _parent_decoder)


async def read_from_child(reader: asyncio.StreamReader) -> FromChild | None:
    """Return the next message; None if the child has exited."""
    return await _read_message(reader, _child_decoder)


def write_message(writer: asyncio.StreamWriter, message: FromParent | FromChild) -> None:
    """Send a message. It is lost if the receiver has exited."""
    writer.write(msgspec.json.encode(message) + b"\n")


async def _read_message(reader: asyncio.StreamReader, decoder: msgspec.json.Decoder[T]) -> T | None:
    try:
        line = await reader.readline()
    except ConnectionError:
        return None
    # The last line of a killed process may be incomplete.
    return decoder.decode(line) if line.endswith(b"\n") else None
