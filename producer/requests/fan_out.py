"""A request for ``n`` answers: ``n`` requests at the broker, and one stream out of theirs.

Each child is a request like any other, with its own log, epoch, resume, cancellation and end, so what holds for one
request, whatever dies, holds for each child. Child 0 has the request's own id and seed. Child ``c`` has
``f"{request_id}~{c}"`` and a seed that follows from the request's: asked again with its seed, a request gives the same
answers, and each of them is what a single request with that child's seed gives.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from ...shared.errors import ValidationError
from ...shared.messages.deltas import Delta
from ...shared.messages.requests import EngineCoreRequest
from ...shared.params.sampling import MAX_N
from ...shared.params.seeds import derived_seed
from ...shared.values.names import MAX_NAME_CHARS, check_name
from ...shared.values.shown import shown
from ..inputs.request_ids import SEPARATOR, check_request_id, is_child_id
from .merging import merged


def child_ids(request_id: str, n: int) -> list[str]:
    """Return the ids under which the broker knows the children of a request.

    Raises:
        ValidationError: ``n`` is out of range, or the id is too long, or that of a child. With ``n=1``, "x~2" is taken
            and means child 2 of "x".
    """
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_N:
        raise ValidationError(f"n must be in [1, {MAX_N}], got {shown(n)}")
    check_name("request_id", request_id)
    if n > 1:
        check_request_id(request_id)
    return [request_id, *(check_name("request_id", f"{request_id}{SEPARATOR}{child}") for child in range(1, n))]


def possible_child_ids(request_id: str) -> list[str]:
    """Return the ids that answers beyond the first may have, of a request whose ``n`` is not known."""
    if is_child_id(request_id) or len(request_id) > MAX_NAME_CHARS - len(f"{SEPARATOR}{MAX_N - 1}"):
        return []
    return child_ids(request_id, MAX_N)[1:]


def children(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """Return the requests with one answer each that a request with a fixed seed stands for; itself if ``n`` is 1.

    Raises:
        ValidationError: as ``child_ids``.
    """
    params = request.sampling_params
    assert params is not None
    assert params.seed is not None
    if params.n == 1:
        return [request]
    return [
        msgspec.structs.replace(
            request,
            request_id=request_id,
            sampling_params=msgspec.structs.replace(
                params,
                n=1,
                seed=derived_seed(params.seed, child),
                prompt_logprobs=None if child else params.prompt_logprobs,
            ),
        )
        for child, request_id in enumerate(child_ids(request.request_id, params.n))
    ]


def merge(streams: Sequence[AsyncGenerator[Delta]]) -> AsyncGenerator[Delta]:
    """Return one stream of the deltas of all, each with its ``child``; see ``merged``."""
    return streams[0] if len(streams) == 1 else _with_children(streams)


async def _with_children(streams: Sequence[AsyncGenerator[Delta]]) -> AsyncGenerator[Delta]:
    async with aclosing(merged(streams)) as deltas:
        async for child, delta in deltas:
            delta.child = child
            yield delta
