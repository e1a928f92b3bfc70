"""What the scheduler and the executor tell each other of one step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ....shared.messages.outcome import TokenLogprobs
from ....shared.params.pooling import Pooled
from .request import Request


@dataclass(slots=True)
class SchedulerOutput:
    """One step's work.

    Args:
        requests: who runs, ``[B]``.
        num_new_tokens: how many tokens of each are computed, ``[B]``, each at least 1.
        released_ids: requests that finished or lost their blocks since the last step; forget their rows first.
        guesses: by place in ``requests``, tokens that may follow the known ones; they are among ``num_new_tokens``.
    """

    requests: list[Request] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    released_ids: list[str] = field(default_factory=list)
    guesses: dict[int, list[int]] = field(default_factory=dict)

    def add(self, request: Request, num_new_tokens: int) -> None:
        self.requests.append(request)
        self.num_new_tokens.append(num_new_tokens)

    def guess(self, place: int, token_ids: list[int]) -> None:
        """Have the request at ``place``, whose known tokens are all computed, compute ``token_ids`` behind them."""
        self.guesses[place] = token_ids
        self.num_new_tokens[place] += len(token_ids)

    def num_known_tokens(self) -> list[int]:
        """How many tokens of each are computed that are no guesses, ``[B]``."""
        if not self.guesses:
            return self.num_new_tokens
        return [count - len(self.guesses.get(place, ())) for place, count in enumerate(self.num_new_tokens)]

    def work(self) -> Iterable[tuple[Request, int]]:
        """Each request with the number of its tokens."""
        return zip(self.requests, self.num_new_tokens, strict=True)


@dataclass(slots=True)
class SampledTokens:
    """One step's result.

    Several tokens of a request are those that as many steps would have given it one by one, in their order. Some may
    follow one that ends it, which whoever made them cannot always know: the scheduler drops those. But none follows one
    with which its grammar has ended or failed.

    Args:
        token_ids: ``[B]``, the new tokens of each request of the ``SchedulerOutput``: mostly one, and none where none
            is due yet. The lists are the scheduler's, which hands them on.
        logprobs: by request_id, of those that asked and have tokens: an entry per token.
        prompt_logprobs: by request_id, of the tokens of its prompt that this step was the first to judge.
        pooled: by request_id, the results of prompts that are pooled and have been computed: they end with it.
    """

    token_ids: list[list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: dict[str, Pooled] = field(default_factory=dict)
