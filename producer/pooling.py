"""Outputs of pooling requests, in vLLM's shapes. No engine of this version pools; ``encode`` says so."""

from __future__ import annotations

import msgspec

from ..shared.messages import Usage


class PoolingOutput(msgspec.Struct, kw_only=True):
    """What a prompt was pooled to: one vector, or one per token."""

    data: list[float] | list[list[float]]


class PoolingRequestOutput(msgspec.Struct, kw_only=True):
    """A finished pooling request."""

    request_id: str
    model: str
    prompt: object
    outputs: PoolingOutput
    usage: Usage | None = None
    finished: bool = True
