"""Plan the calls of the server for a request.

Delivered tokens are appended to the prompt. With a grammar that is impossible, because both servers apply it from the
first generated token on. Such a call generates the delivered tokens again, and must generate the same ones.

If tokens are missing in a stream, the stream is dropped, and the request continues after the last received token with
calls without streaming. They are short, so that the reader still receives tokens regularly.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...engine.scheduling.request import Request
from .dialect import ServerCall

# Tokens of a call without streaming. Each call looks up the prompt in the cache, in the time of one or two tokens.
PIECE_TOKENS = 16


class OtherTokensError(Exception):
    """The server generates other tokens than the delivered ones, and its grammar cannot start after them."""


@dataclass
class Running:
    """A request and its current call.

    Attributes:
        request: its prompt, and its output: delivered tokens and those received since.
        call: current call; None before the first.
        call_id: id of the current call.
        num_calls: number of calls so far.
        num_cached_tokens: prompt tokens that were in the server's cache at the first call.
        num_received: received tokens of the current call.
        repeated: delivered tokens that the current call will generate again.
    """

    request: Request
    is_streamed: bool = True
    call: ServerCall | None = None
    call_id: int = 0
    num_calls: int = 0
    num_cached_tokens: int = 0
    num_received: int = 0
    repeated: list[int] = field(default_factory=list)

    def plan(self) -> ServerCall:
        """Return the next call, which becomes the current one."""
        request = self.request
        self.num_calls += 1
        self.num_received = 0
        if request.params.structured_outputs is not None:
            self.repeated = request.token_ids[request.num_prompt_tokens :]
            prompt, num_output_tokens = request.token_ids[: request.num_prompt_tokens], 0
        else:
            prompt, num_output_tokens = list(request.token_ids), request.num_output_tokens
        max_new_tokens = request.max_output_tokens - num_output_tokens
        if not self.is_streamed and request.params.structured_outputs is None:
            max_new_tokens = min(max_new_tokens, PIECE_TOKENS)
        self.call = ServerCall(
            prompt, request.params, request.seed, max_new_tokens, num_output_tokens, is_streamed=self.is_streamed
        )
        return self.call

    @property
    def is_piece(self) -> bool:
        """Whether more tokens may follow after the current call has reached its length."""
        call = self.call
        assert call is not None
        return call.num_output_tokens + call.max_new_tokens < self.request.max_output_tokens

    def add_received(self, token_ids: list[int]) -> list[int]:
        """Record the next tokens of the call, and return those that were not delivered before.

        Raises:
            OtherTokensError: the call should have generated other tokens.
        """
        self.num_received += len(token_ids)
        num_repeated = min(len(token_ids), len(self.repeated))
        if token_ids[:num_repeated] != self.repeated[:num_repeated]:
            raise OtherTokensError
        del self.repeated[:num_repeated]
        return token_ids[num_repeated:]
