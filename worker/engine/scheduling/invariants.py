"""Invariants of a scheduler's requests between two steps."""

from __future__ import annotations

from collections.abc import Iterable

from .blocks.block_pool import BlockPool, InvariantError
from .request import Request, RequestStatus


def check_requests(running: list[Request], waiting: list[Request], known: Iterable[str]) -> None:
    """Verify that the queues hold exactly the known requests, each with a status that matches its queue.

    Raises:
        InvariantError: they do not.
    """
    if sorted(request.request_id for request in running + waiting) != sorted(known):
        raise InvariantError("the queues do not hold exactly the known requests")
    if any(request.status is not RequestStatus.RUNNING for request in running):
        raise InvariantError("a request in the running queue has another status")
    may_wait = RequestStatus.WAITING, RequestStatus.PREEMPTED
    if any(request.status not in may_wait or request.block_table for request in waiting):
        raise InvariantError("a request in the waiting queue is running, is finished, or holds blocks")


def check_tokens(running: list[Request], pool: BlockPool, max_model_len: int) -> None:
    """Verify that running requests have blocks for their computed tokens, and at least one token to compute.

    Raises:
        InvariantError: a request has not.
    """
    for request in running:
        if not 0 <= request.num_computed_tokens < request.num_tokens <= max_model_len:
            raise InvariantError(f"request {request.request_id} has impossible token counts")
        if len(request.block_table) < pool.blocks_for(request.num_computed_tokens):
            raise InvariantError(f"request {request.request_id} has fewer blocks than computed tokens")
