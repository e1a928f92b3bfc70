"""What is asked of the server for a request, call after call.

Tokens that were delivered are the end of the prompt. With a grammar they cannot be, for both servers begin it with the
first token that they make: so such a call makes them again, and what it makes has to be what was delivered.

Where tokens are missing in a stream, it is dropped, and the request goes on from the last token that came, with calls
that are not streamed: short ones, so that its reader still sees tokens come.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...engine.scheduling.request import Request
from .dialect import Asked

# Of a call that is not streamed. Each begins with a look-up of the prompt's cache: a token's time or two.
PIECE_TOKENS = 16


class OtherTokensError(Exception):
    """The server makes other tokens than were delivered, and its grammar cannot begin after them."""


@dataclass
class Running:
    """A request, and the call that is made for it.

    Attributes:
        request: its prompt, and as output what was delivered and what has come since.
        asked: the present call; None before the first.
        call_id: of that.
        num_calls: those made so far.
        num_cached_tokens: of the prompt, that were in the server's cache at the first call.
        num_seen: tokens of the present call that have come.
        repeated: those of them that are still to come which were delivered already.
    """

    request: Request
    is_streamed: bool = True
    asked: Asked | None = None
    call_id: int = 0
    num_calls: int = 0
    num_cached_tokens: int = 0
    num_seen: int = 0
    repeated: list[int] = field(default_factory=list)

    def plan(self) -> Asked:
        """Go over to the next call."""
        request = self.request
        self.num_calls += 1
        self.num_seen = 0
        if request.params.structured_outputs is not None:
            self.repeated = request.token_ids[request.num_prompt_tokens :]
            prompt, num_output_tokens = request.token_ids[: request.num_prompt_tokens], 0
        else:
            prompt, num_output_tokens = list(request.token_ids), request.num_output_tokens
        max_new_tokens = request.max_output_tokens - num_output_tokens
        if not self.is_streamed and request.params.structured_outputs is None:
            max_new_tokens = min(max_new_tokens, PIECE_TOKENS)
        self.asked = Asked(
            prompt, request.params, request.seed, max_new_tokens, num_output_tokens, is_streamed=self.is_streamed
        )
        return self.asked

    @property
    def is_piece(self) -> bool:
        """Whether more tokens may follow when the present call has come to its length."""
        asked = self.asked
        assert asked is not None
        return asked.num_output_tokens + asked.max_new_tokens < self.request.max_output_tokens

    def take_new(self, token_ids: list[int]) -> list[int]:
        """Return those of a call's next tokens that were not delivered before.

        Raises:
            OtherTokensError: it should have made others first.
        """
        self.num_seen += len(token_ids)
        num_repeated = min(len(token_ids), len(self.repeated))
        if token_ids[:num_repeated] != self.repeated[:num_repeated]:
            raise OtherTokensError
        del self.repeated[:num_repeated]
        return token_ids[num_repeated:]
