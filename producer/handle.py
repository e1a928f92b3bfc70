"""A handle on a request that runs whether or not anybody listens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from ..shared.errors import ValidationError
from ..shared.messages import Delta
from .outputs import RequestOutput
from .reader import collect

if TYPE_CHECKING:
    from .client import Client


class RequestHandle:
    """Result, stream and cancellation of a detached request; made by ``Client.submit`` or ``Client.handle``.

    A handle holds no connection of its own: any process that knows model and request_id can make one.
    """

    def __init__(self, client: Client, model: str, request_id: str, prompt: object = None) -> None:
        self._client = client
        self.model = model
        self.request_id = request_id
        self._prompt = prompt

    async def result(self) -> RequestOutput:
        """Wait for the end and return the whole output.

        Raises:
            EngineDeadError: it was enqueued with ``fail_fast``, and the last engine died before it ended.
            PoisonRequestError: ``max_deliveries`` engines died on it; it is parked in the dead letter.
            RequestFailedError: the engine refused or failed the request (or a ``ValidationError`` it found).
            RequestNotFoundError: the request is unknown, or its result has expired.
        """
        return await collect(self.stream(), self.model, self.request_id, self._prompt)

    def stream(self, after: int = -1) -> AsyncGenerator[Delta]:
        """Iterate over the deltas that follow token ``after`` (-1: from the first). Leaving early cancels nothing.

        Any number of readers may stream one request, at any time until its result expires.
        """
        if isinstance(after, bool) or not isinstance(after, int) or after < -1:
            raise ValidationError(f"after must be a token index, at least -1, got {after!r}")
        return self._client.follow(self.model, self.request_id, after)

    async def cancel(self) -> None:
        """End the request with finish_reason "cancelled"; after its end, or a second time, this does nothing."""
        await self._client.cancel(self.request_id, model=self.model)
