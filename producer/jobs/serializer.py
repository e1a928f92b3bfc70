"""Encoding of jobs and results: msgpack of plain data, errors as [code, message, retryable]. No pickle."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from ...shared.errors import PenstockError, from_wire

_ERROR = 1


def serialize(value: dict[str, Any]) -> bytes:
    """Encode a job or result, as arq's ``job_serializer``: plain data, msgspec structs, and exceptions as results.

    Raises:
        TypeError: it contains anything else; arq then refuses the job, or stores the error as its result.
    """
    return _encoder.encode(value)


def deserialize(data: bytes) -> dict[str, Any]:
    """Decode a job or result, as arq's ``job_deserializer``.

    Structs become dicts or lists, and errors those of ``penstock.shared.errors``.
    """
    return _decoder.decode(data)


def _to_plain(value: Any) -> Any:
    if isinstance(value, BaseException):
        code = value.code if isinstance(value, PenstockError) else type(value).__name__
        message = "the job was aborted" if isinstance(value, asyncio.CancelledError) else str(value)
        error = [code, message, isinstance(value, PenstockError) and value.retryable]
        return msgspec.msgpack.Ext(_ERROR, msgspec.msgpack.encode(error))
    raise TypeError(f"jobs take and return plain data (numbers, text, bytes, lists, dicts), got {type(value).__name__}")


def _from_ext(code: int, data: memoryview) -> Any:
    if code != _ERROR:
        raise msgspec.DecodeError(f"unknown extension type {code} in a job")
    return from_wire(*msgspec.msgpack.decode(data, type=tuple[str, str, bool]))


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_decoder = msgspec.msgpack.Decoder(ext_hook=_from_ext)
