"""The interface between scheduler and executor: the values that they exchange for one step, and the executor itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from ....shared.messages.core import EngineCoreOutput
from ....shared.messages.outcome import FinishReason, TokenLogprobs
from ....shared.params.pooling import Pooled
from .request import Request


@dataclass(slots=True)
class SchedulerOutput:
    """Work of one step.

    Args:
        requests: requests of the step, ``[B]``.
        num_new_tokens: tokens to compute for each, ``[B]``, each at least 1.
        released_ids: requests that finished or lost their blocks since the last step; forget their rows first.
        drafts: draft tokens that may follow the known ones, by index in ``requests``. ``num_new_tokens`` counts them.
    """

    requests: list[Request] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    released_ids: list[str] = field(default_factory=list)
    drafts: dict[int, list[int]] = field(default_factory=dict)

    def add(self, request: Request, num_new_tokens: int) -> None:
        self.requests.append(request)
        self.num_new_tokens.append(num_new_tokens)

    def add_drafts(self, place: int, token_ids: list[int]) -> None:
        """Add draft tokens to the request at index ``place``, whose known tokens are all computed."""
        self.drafts[place] = token_ids
        self.num_new_tokens[place] += len(token_ids)

    def num_known_tokens(self) -> list[int]:
        """Return how many tokens of each request are computed without draft tokens, ``[B]``."""
        if not self.drafts:
            return self.num_new_tokens
        return [count - len(self.drafts.get(place, ())) for place, count in enumerate(self.num_new_tokens)]

    def work(self) -> Iterable[tuple[Request, int]]:
        """Return pairs of a request and the number of its new tokens."""
        return zip(self.requests, self.num_new_tokens, strict=True)


@dataclass(slots=True)
class SampledTokens:
    """Result of one step.

    Several tokens of a request equal the tokens that as many single steps would give, in order. Some may follow a token
    that ends the request, which the executor cannot always detect: the scheduler drops them. None follows a token with
    which the grammar has ended or failed.

    Args:
        token_ids: ``[B]``, the new tokens of each request of the ``SchedulerOutput``: mostly one, and none while its
            prompt is incomplete. The scheduler owns the lists, and passes them on.
        logprobs: by request_id, an entry per token, of requests that asked for them and have tokens.
        prompt_logprobs: by request_id, of prompt tokens that this step scored first.
        pooled: by request_id, results of pooled prompts that are complete. These requests end.
    """

    token_ids: list[list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: dict[str, Pooled] = field(default_factory=dict)


def make_output(request: Request, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> EngineCoreOutput:
    """Return the output for new tokens, which may be none; the first one carries counts, events and prompt logprobs."""
    output = EngineCoreOutput(request.request_id, token_ids)
    if token_ids:
        output.num_cached_tokens = request.num_cached_tokens
        if request.images:
            output.num_prompt_tokens = request.num_prompt_tokens
        if request.events:
            output.events = request.pop_events()
        if request.prompt_logprobs is not None:
            output.new_prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        if logprobs:
            output.new_logprobs = logprobs[: len(token_ids)]
    return output


def make_pooled_output(request: Request, pooled: Pooled) -> EngineCoreOutput:
    """Return the only output of a pooling request."""
    return EngineCoreOutput(
        request.request_id,
        finish_reason=FinishReason.STOP,
        num_cached_tokens=request.num_cached_tokens,
        events=request.pop_events(),
        pooled=pooled,
    )


class AcceleratorError(Exception):
    """The device itself reported an error while it ran a step."""


class Executor(Protocol):
    """Runs one scheduled step on the model."""

    @property
    def device_memory_bytes(self) -> int:
        """Bytes of accelerator memory in use; 0 without an accelerator."""
        ...

    def execute(self, output: SchedulerOutput) -> SampledTokens:
        """Compute ``output`` and return the new tokens of each request; none before the end of its prompt.

        The request's grammar, if it has one, has already accepted them.

        Raises:
            AcceleratorError: the device failed.
        """
        ...
