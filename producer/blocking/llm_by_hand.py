"""``LLM`` for scripts that add requests and step by hand, as with vLLM's ``LLMEngine``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

from ..by_hand import RequestsByHand, StepOutput
from ..detached import Params
from ..inputs.options import SharedOptions
from ..inputs.prompt import Prompt
from .llm_control import LLMControl


class LLMByHand(LLMControl):
    """The part of ``LLM`` in which a caller adds requests and takes their outputs step by step."""

    _by_hand: RequestsByHand | None = None

    def add_request(
        self, request_id: str, prompt: Prompt, params: Params = None, **options: Unpack[SharedOptions]
    ) -> str:
        """Enqueue a request whose outputs ``step`` gives, and return its id; see ``Client.add_request``.

        It is detached: it runs on if this process dies, and adding it again attaches to what there is of it.
        ``params.output_kind`` says what each output holds: what is new (``DELTA``, as everywhere here), all so far
        (``CUMULATIVE``), or the whole, once (``FINAL_ONLY``).

        Raises:
            ValidationError: one of that id was added here and is not finished.
            and as ``Client.submit``.
        """

        async def add() -> None:
            await self._requests_by_hand().add(request_id, prompt, params, **options)

        self.call(add())
        return request_id

    def step(self, timeout_s: float | None = None) -> list[StepOutput]:
        """Wait for outputs of the requests that were added here, and return those since the last step.

        Waits at most ``timeout_s``. The list is empty after that time, and if all requests are finished. A pooling
        request has one ``PoolingRequestOutput``, any other request ``RequestOutput``s.

        Raises:
            PenstockError: a request ended with an error; a note of it has the id. Others go on.
        """

        async def step() -> list[StepOutput]:
            return await self._requests_by_hand().step(timeout_s)

        return self.call(step())

    def has_unfinished_requests(self) -> bool:
        """Whether ``step`` has something to give, or will have. Of all clients' requests
        ``get_num_unfinished_requests`` speaks.
        """
        return self._here_by_hand() is not None and self._requests_by_hand().is_unfinished

    def abort_request(self, request_id: str | Iterable[str], *, model: str | None = None) -> None:
        """End requests; ``step`` gives nothing more of them. Unknown ids are passed over."""
        wanted = [request_id] if isinstance(request_id, str) else list(request_id)

        async def abort() -> None:
            await self._requests_by_hand().abort(wanted, model)

        self.call(abort())

    def _here_by_hand(self) -> RequestsByHand | None:
        """Those of this process's client: a child of a fork begins with none."""
        known, client = self._by_hand, self._client
        return known if known is not None and known.client is client else None

    def _requests_by_hand(self) -> RequestsByHand:
        known = self._here_by_hand()
        if known is None:
            known = self._by_hand = RequestsByHand(self._client)
        return known
