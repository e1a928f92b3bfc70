"""The dead letter of one model: its parked requests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
from redis.exceptions import ResponseError

from ..connection import CommandConnection
from ..deployment.records import DeadRequest, DeathCause
from ..errors import PenstockError
from ..keys import ModelKeys
from ..messages.requests import EngineCoreRequest
from ..values.checks import check_text
from .script import WRONG_TYPE, run_script

_request_decoder = msgspec.msgpack.Decoder(EngineCoreRequest)
_cause_decoder = msgspec.msgpack.Decoder(DeathCause)
_encoder = msgspec.msgpack.Encoder()


class DeadLetter:
    """Lists parked requests, queues them again, or deletes them.

    All methods raise ``RedisUnavailableError`` when Redis is unavailable for longer than the connection retries, and
    ``ValidationError`` for an id that is not text.
    """

    def __init__(self, connection: CommandConnection, keys: ModelKeys) -> None:
        self._connection = connection
        self._keys = keys

    async def ids(self) -> list[str]:
        """Return the ids of all parked requests, oldest first."""
        return [request_id.decode() for request_id in await self._connection.execute("ZRANGE", self._keys.dead, 0, -1)]

    async def list(self) -> list[DeadRequest]:
        """Return all parked requests, oldest first."""
        requests = [await self.show(request_id) for request_id in await self.ids()]
        return [request for request in requests if request is not None]

    async def count(self) -> int:
        return await self._connection.execute("ZCARD", self._keys.dead)

    async def newest(self, limit: int) -> Sequence[tuple[str, float]]:
        """Return ids of the last parked requests and when they were parked (Unix time), newest first."""
        flat = await self._connection.execute("ZRANGE", self._keys.dead, -limit, -1, "WITHSCORES")
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return [(request_id.decode(errors="replace"), float(score) / 1000) for request_id, score in pairs][::-1]

    async def show(self, request_id: str) -> DeadRequest | None:
        """Return one parked request, or None if none has this id."""
        try:
            flat = await self._connection.execute("HGETALL", self._keys.parked(request_id))
        except ResponseError as error:
            if WRONG_TYPE not in str(error):
                raise
            flat = [b"payload", b""]  # something exists, which can be purged
        return _dead_request(request_id, dict(zip(flat[::2], flat[1::2], strict=True))) if flat else None

    async def replay(self, request_id: str) -> bool:
        """Queue a parked request again under its id, detached. False if no request of this id is parked."""
        arguments = [check_text("request_id", request_id)]
        return bool(await run_script(self._connection, self._keys, "replay", [self._keys.leases], arguments))

    async def purge(self, request_id: str) -> bool:
        """Delete a parked request. False if none has this id."""
        arguments = [check_text("request_id", request_id)]
        return bool(await run_script(self._connection, self._keys, "discard", [self._keys.leases], arguments))


def input_hash(payload: bytes) -> str:
    """Return the SHA-256 of a request's content, without its id; "" if it cannot be decoded."""
    try:
        request = _request_decoder.decode(payload)
    except (msgspec.MsgspecError, PenstockError, UnicodeDecodeError):
        return ""
    params = request.sampling_params
    if params is not None:
        params = msgspec.structs.replace(params, seed=None)
    content = [request.prompt_token_ids, request.prompt, request.messages, request.chat_template_kwargs, params]
    if request.prompt_embeds is not None:
        content.append(request.prompt_embeds)
    if request.images:
        content.append([image.digest for image in request.images])
    if request.pooling_params is not None:
        content += [request.pooling_params, request.text_pair]
    return hashlib.sha256(_encoder.encode(content)).hexdigest()


def _dead_request(request_id: str, fields: dict[bytes, Any]) -> DeadRequest:
    payload = fields.get(b"payload")
    try:
        cause = _cause_decoder.decode(fields[b"cause"])
        # A reaper passes one cause for all engines; the script adds which engine it was.
        cause = msgspec.structs.replace(cause, engine_id=fields[b"engine"].decode())
    except (KeyError, msgspec.MsgspecError, UnicodeDecodeError):
        cause = None  # an entry of a lane, or damaged
    return DeadRequest(
        request_id=request_id,
        parked_at=_number(fields, b"parked_at_ms") / 1000,
        payload=fields.get(b"fields", b"") if payload is None else payload,
        is_request=payload is not None,
        deliveries=_number(fields, b"deliveries"),
        deaths=_number(fields, b"deaths"),
        num_output_tokens=_number(fields, b"num_output_tokens"),
        input_hash="" if payload is None else input_hash(payload),
        cause=cause,
    )


def _number(fields: dict[bytes, Any], name: bytes) -> int:
    """Return the number of a field, 0 if it is damaged."""
    value = fields.get(name, b"")
    return int(value) if value.isdigit() and len(value) < 16 else 0
