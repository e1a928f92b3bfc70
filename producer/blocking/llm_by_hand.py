"""``LLM`` for scripts that add requests and call ``step`` themselves, as with vLLM's ``LLMEngine``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

from ..by_hand import StepOutput, SteppedRequests
from ..client import Client
from ..detached import Params
from ..inputs.options import SharedOptions
from ..inputs.prompt import Prompt
from .llm_control import LLMControl


class SteppedLLM(LLMControl):
    """The part of ``LLM`` in which a caller adds requests and reads their outputs step by step."""

    _stepped: SteppedRequests | None = None

    def add_request(
        self, request_id: str, prompt: Prompt, params: Params = None, **options: Unpack[SharedOptions]
    ) -> str:
        """Enqueue a request whose outputs ``step`` returns, and return its id; see ``Client.add_request``.

        It is detached: it continues if this process dies, and adding it again attaches to it. ``params.output_kind``
        selects the content of each output: the new part (``DELTA``, the default), all so far (``CUMULATIVE``), or the
        whole output once (``FINAL_ONLY``).

        Raises:
            ValidationError: a request of that id was added here and is not finished.
            and as ``Client.submit``.
        """

        async def add() -> None:
            await self._stepped_requests().add(request_id, prompt, params, **options)

        self.call(add())
        return request_id

    def step(self, timeout_s: float | None = None) -> list[StepOutput]:
        """Wait for outputs of the requests that were added here, and return those since the last step.

        Waits at most ``timeout_s``. The list is empty after that time, and if all requests are finished. A pooling
        request has one ``PoolingRequestOutput``, any other request ``RequestOutput``s.

        Raises:
            PenstockError: a request ended with an error; a note of the error has its id. Other requests continue.
        """

        async def step() -> list[StepOutput]:
            return await self._stepped_requests().step(timeout_s)

        return self.call(step())

    def has_unfinished_requests(self) -> bool:
        """Return whether ``step`` has outputs to return, now or later. For the requests of all clients, see
        ``get_num_unfinished_requests``.
        """
        stepped = self._own_process_requests(self._client)
        return stepped is not None and stepped.is_unfinished

    def abort_request(self, request_id: str | Iterable[str], *, model: str | None = None) -> None:
        """End requests; ``step`` returns no more of their outputs. Unknown ids are ignored."""
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)

        async def abort() -> None:
            await self._stepped_requests().abort(request_ids, model)

        self.call(abort())

    def _own_process_requests(self, client: Client) -> SteppedRequests | None:
        """Return the requests that were added through ``client``; None in a forked child, which has another client."""
        stepped = self._stepped
        return stepped if stepped is not None and stepped.client is client else None

    def _stepped_requests(self) -> SteppedRequests:
        client = self._client
        stepped = self._own_process_requests(client)
        if stepped is None:
            stepped = self._stepped = SteppedRequests(client)
        return stepped
