"""The input of resumable requests: chunks that are added while they run, and its end."""

from __future__ import annotations

from typing import Any

import msgspec

from ..connection import CommandConnection
from ..errors import BrokerError, InputClosedError, PayloadTooLargeError, RequestNotFoundError, ValidationError
from ..keys import ModelKeys
from ..messages.requests import InputChunk
from ..values.shown import shown
from .admission import budget_refusal
from .script import refusing_damage, run_script

# Limits of one request, in addition to its first chunk, whose size is limited as that of every request.
MAX_CHUNKS = 10_000
MAX_INPUT_BYTES = 4 * 1024 * 1024

_encoder = msgspec.msgpack.Encoder()


class RequestInput:
    """The input of one model's resumable requests, as the broker stores it.

    All methods raise ``RedisUnavailableError`` when Redis is unavailable for longer than the connection retries.
    """

    def __init__(self, connection: CommandConnection, keys: ModelKeys) -> None:
        self._connection = connection
        self._keys = keys

    async def extend(
        self,
        request_id: str,
        number: int,
        chunk: InputChunk,
        *,
        num_prompt_tokens: int = 0,
        max_tokens: int = 0,
        max_chunks: int = MAX_CHUNKS,
        max_bytes: int = MAX_INPUT_BYTES,
    ) -> bool:
        """Append chunk ``number``; chunk 0 came with the request. False if it was there already.

        Args:
            num_prompt_tokens, max_tokens: counts of this chunk, as in an ``Entry``.
            max_chunks, max_bytes: limits for all chunks of the request but the first.

        Raises:
            RequestNotFoundError: the request is unknown, or its result has expired.
            InputClosedError: it has ended, or its input was closed.
            PayloadTooLargeError: its input would exceed ``max_chunks`` or ``max_bytes``.
            ValidationError: it is not resumable, or has another chunk of that number.
            InsufficientQuotaError: a budget of its tenant or API key is used up.
            BrokerError: a chunk before this one is missing.
        """
        answer = await self._run_on_request(
            "extend",
            request_id,
            number,
            _encoder.encode(chunk),
            num_prompt_tokens,
            max_tokens,
            max_chunks,
            max_bytes,
        )
        if answer[0] not in (b"added", b"known"):
            raise _input_refusal(request_id, number, answer)
        return answer[0] == b"added"

    async def close(self, request_id: str) -> None:
        """Close the input: the request ends when it has answered its chunks.

        Raises:
            RequestNotFoundError: the request is unknown, or its result has expired.
            ValidationError: it is not resumable.
        """
        answer = await self._run_on_request("close_input", request_id)
        if answer[0] != b"closed":
            raise _input_refusal(request_id, 0, answer)

    async def read(self, request_id: str) -> list[bytes]:
        """Return the encoded chunks of the request without its first, in order.

        Raises:
            DamagedRecordError: something other than the scripts has written there.
        """
        with refusing_damage(request_id, "input"):
            return await self._connection.execute("LRANGE", self._keys.input(request_id), 0, -1)

    async def _run_on_request(self, name: str, request_id: str, *args: Any) -> list[Any]:
        keys = [self._keys.request(request_id)]
        answer = await run_script(self._connection, self._keys, name, keys, [request_id, *args])
        if answer is None:
            raise RequestNotFoundError(f"request {shown(request_id)} is unknown, or its result has expired")
        return answer


def _input_refusal(request_id: str, number: int, answer: list[Any]) -> Exception:
    kind = answer[0].decode()
    if kind == "over_budget":
        return budget_refusal(f"of request {shown(request_id)}", answer)
    if kind == "not_resumable":
        return ValidationError(
            f"request {shown(request_id)} is not resumable: only a request with resumable=True accepts chunks"
        )
    if kind == "other_chunk":
        return ValidationError(
            f"request {shown(request_id)} already has another chunk {number}: only one writer may extend a request"
        )
    if kind == "ended":
        return InputClosedError(
            f"request {shown(request_id)} accepts no more input: it has ended ({answer[1].decode()})"
        )
    if kind == "closed":
        return InputClosedError(f"request {shown(request_id)} accepts no more input: it was closed")
    if kind == "full":
        unit, limit = answer[1].decode(), answer[2]
        return PayloadTooLargeError(
            f"request {shown(request_id)} may have {limit} {unit} of input after its first chunk, and chunk {number} "
            "exceeds that; begin a new request"
        )
    return BrokerError(f"request {shown(request_id)} has {answer[1]} chunks, so number {number} leaves a gap")
