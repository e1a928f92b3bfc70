"""The header ``Idempotency-Key``: the same key with the same body joins the running generation, or reads its result.

A key reserves a generation, from which the ids of its requests follow. The queue does the rest, because a request with
a known id is attached to. So a repeated call may reach any gateway, also after the first one was killed. ``stream`` is
not part of the body, because a client that lost a stream may ask for the whole answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request

from ...shared.errors import RequestNotFoundError
from ...shared.queue.lifecycle import RequestState
from ...shared.values.shown import shown
from .. import Client
from ..openai.errors import OpenAIError
from .http import gateway_of
from .reservations import HEADER, Reservation

_KEY = re.compile(r"[\x21-\x7e]{1,200}")
# A generation that ended so has no answer, so the same key starts another one.
_WITHOUT_ANSWER = (RequestState.CANCELLED, RequestState.FAILED, RequestState.PARKED)


def key_of(request: Request) -> str | None:
    """Return the key of an HTTP request; None without one.

    Raises:
        OpenAIError: 400, the key is too long, or has other characters than visible ASCII.
    """
    key = request.headers.get(HEADER)
    if key is not None and not _KEY.fullmatch(key):
        message = f"{HEADER} must be 1 to 200 visible ASCII characters, got {shown(key)}"
        raise OpenAIError(400, message, param=HEADER, code="invalid_idempotency_key")
    return key


async def reserved(
    request: Request, ids_of: Callable[[Reservation], Sequence[str]], model: Callable[[], Awaitable[str]]
) -> Reservation | None:
    """Return the reservation for an HTTP request; None if it has no key.

    Args:
        request: see ``reserve``.
        ids_of: returns the ids of the requests of a reservation.
        model: returns the name of their model.

    Raises:
        OpenAIError: 400, the key is invalid; 409, it was used for another body.
    """
    entry = await reserve(request)
    if entry is None:
        return None
    (reservation, is_new), key = entry, request.headers[HEADER]
    gateway, tenant = gateway_of(request), request.state.identity.tenant
    while not is_new and await _ended_without_answer(gateway.client, ids_of(reservation), await model()):
        reservation = await gateway.idempotency.replace(tenant, key, reservation)
    return reservation


async def reserve(request: Request) -> tuple[Reservation, bool] | None:
    """Return the reservation for an HTTP request, and whether it is new; None if the request has no key.

    Args:
        request: its state has ``body_digest``, the digest of path and body, if it has a key.

    Raises:
        OpenAIError: as ``reserved``.
    """
    key = key_of(request)
    if key is None:
        return None
    return await gateway_of(request).idempotency.reserve(request.state.identity.tenant, key, request.state.body_digest)


async def _ended_without_answer(client: Client, request_ids: Sequence[str], model: str) -> bool:
    states = await asyncio.gather(*(_state(client, request_id, model) for request_id in request_ids))
    return any(state in _WITHOUT_ANSWER for state in states)


async def _state(client: Client, request_id: str, model: str) -> RequestState | None:
    try:
        return (await client.status(request_id, model)).state
    except RequestNotFoundError:
        return None
