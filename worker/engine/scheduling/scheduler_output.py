"""What the scheduler and the executor tell each other of one step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ....shared.messages import TokenLogprobs
from .request import Request

NO_TOKEN = -1


@dataclass(slots=True)
class SchedulerOutput:
    """One step's work.

    Args:
        requests: who runs, ``[B]``.
        num_new_tokens: how many tokens of each are computed, ``[B]``, each at least 1.
        released_ids: requests that finished or lost their blocks since the last step; forget their rows first.
    """

    requests: list[Request] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    released_ids: list[str] = field(default_factory=list)

    def add(self, request: Request, num_new_tokens: int) -> None:
        self.requests.append(request)
        self.num_new_tokens.append(num_new_tokens)

    def work(self) -> Iterable[tuple[Request, int]]:
        """Each request with the number of its tokens."""
        return zip(self.requests, self.num_new_tokens, strict=True)


@dataclass(slots=True)
class SampledTokens:
    """One step's result.

    Args:
        token_ids: ``[B]``, the new token of each request of the ``SchedulerOutput``, or ``NO_TOKEN``.
        logprobs: by request_id, of those that asked and have a token.
        prompt_logprobs: by request_id, of the tokens of its prompt that this step was the first to judge.
    """

    token_ids: list[int]
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
