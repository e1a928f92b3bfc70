"""How jobs and results are written: msgpack of plain data, errors as [code, message, retryable]. No pickle."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from ...shared.errors import PenstockError, from_wire

_ERROR = 1


def serialize(value: dict[str, Any]) -> bytes:
    """arq's ``job_serializer``: takes plain data, msgspec structs, and exceptions as results.

    Raises:
        TypeError: it holds something else; arq then refuses the job, or says so as its result.
    """
    return _encoder.encode(value)


def deserialize(data: bytes) -> dict[str, Any]:
    """arq's ``job_deserializer``: structs come as dicts or lists, exceptions as those of ``penstock.shared.errors``."""
    return _decoder.decode(data)


def _to_plain(value: Any) -> Any:
    if isinstance(value, BaseException):
        code = value.code if isinstance(value, PenstockError) else type(value).__name__
        message = "it was aborted" if isinstance(value, asyncio.CancelledError) else str(value)
        error = [code, message, isinstance(value, PenstockError) and value.retryable]
        return msgspec.msgpack.Ext(_ERROR, msgspec.msgpack.encode(error))
    raise TypeError(f"jobs take and return plain data (numbers, text, bytes, lists, dicts), got {type(value).__name__}")


def _from_ext(code: int, data: memoryview) -> Any:
    if code != _ERROR:
        raise msgspec.DecodeError(f"extension type {code} is none of a job's")
    return from_wire(*msgspec.msgpack.decode(data, type=tuple[str, str, bool]))


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_decoder = msgspec.msgpack.Decoder(ext_hook=_from_ext)
