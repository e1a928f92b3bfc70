"""Output of a worker process for a client: the records of a request's log, which are also sent on its channel."""

from __future__ import annotations

import msgspec

from ..params.pooling import Pooled
from ..stats import RequestStats
from . import WIRE_VERSION
from .outcome import FinishReason, RequestError, TokenLogprobs, Usage


class SegmentEnd(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """The end of a resumable request's output for chunk ``number`` of its input, counted from 0.

    ``next_index`` is the index of the first output token after it.
    """

    number: int
    next_index: int
    finish_reason: FinishReason
    stop_reason: int | str | None = None


class Delta(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Output that one append added to a request: the record in its log and the message on its channel.

    ``index`` is the position of ``token_ids[0]`` among the output tokens, so a reader notices a gap and a repeat.
    ``text`` may lag behind ``token_ids`` while a character is incomplete or a stop string may be forming.
    Only the last delta has a ``finish_reason``.
    ``logprobs`` has one entry per token of ``token_ids``, or none if they were not requested.
    ``prompt_logprobs`` has one entry per token of the prompt but its first, if requested. It is sent once, with the
    first token and ``first_prompt_token``: id and bytes of the first token, which has no log probability.
    ``stats`` are sent with the first token and with the end.
    ``child`` says which of a request's ``n`` answers it belongs to; set by the client, 0 on the wire.
    ``segment_ends`` are the ends of a resumable request's segments in it. A record of the log, and a delta of a stream,
    has at most one, at its end; ``usage`` then counts all tokens so far.
    ``pooled`` is the result of a prompt that was pooled: its only record, which has no tokens.
    ``weights_version`` names the weights of the tokens from here on. The first delta of each engine has it, so a
    request whose first engine died, or got other weights, has it again. A merged delta has the last one.
    ``begins_in_reasoning`` says whether the prompt of a chat ends within the model's reasoning, or after it. The first
    delta of the output has it; None if the end of the prompt does not show it.
    ``prompt_usage`` counts the tokens of the prompt, and those that were cached. The delta of the first output token
    has it, because some APIs report the prompt before the answer.
    """

    version: int = WIRE_VERSION
    index: int = 0
    token_ids: list[int] = []
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: RequestError | None = None
    usage: Usage | None = None
    logprobs: list[TokenLogprobs] = []
    child: int = 0
    prompt_logprobs: list[TokenLogprobs] = []
    stats: RequestStats | None = None
    segment_ends: list[SegmentEnd] = []
    first_prompt_token: tuple[int, bytes] | None = None
    pooled: Pooled | None = None
    weights_version: str = ""
    begins_in_reasoning: bool | None = None
    prompt_usage: Usage | None = None

    def extend(self, later: Delta) -> None:
        """Append the next delta to this one in place, as ``followed_by`` would, but without a copy."""
        self.token_ids += later.token_ids
        self.text += later.text
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.error, self.usage = later.error, later.usage
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.first_prompt_token = self.first_prompt_token or later.first_prompt_token
        self.stats = later.stats or self.stats
        self.segment_ends += later.segment_ends
        self.pooled = later.pooled or self.pooled
        self.weights_version = later.weights_version or self.weights_version
        if self.begins_in_reasoning is None:
            self.begins_in_reasoning = later.begins_in_reasoning
        self.prompt_usage = self.prompt_usage or later.prompt_usage

    def followed_by(self, later: Delta) -> Delta:
        """Return this delta and the next one as one delta."""
        return msgspec.structs.replace(
            later,
            index=self.index,
            token_ids=self.token_ids + later.token_ids,
            text=self.text + later.text,
            logprobs=self.logprobs + later.logprobs,
            prompt_logprobs=self.prompt_logprobs + later.prompt_logprobs,
            stats=later.stats or self.stats,
            segment_ends=self.segment_ends + later.segment_ends,
            first_prompt_token=self.first_prompt_token or later.first_prompt_token,
            weights_version=later.weights_version or self.weights_version,
            begins_in_reasoning=(
                later.begins_in_reasoning if self.begins_in_reasoning is None else self.begins_in_reasoning
            ),
            prompt_usage=self.prompt_usage or later.prompt_usage,
        )

    @property
    def next_index(self) -> int:
        """Index of the token that follows this delta; pass ``next_index - 1`` as ``after`` to resume here."""
        return self.index + len(self.token_ids)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def segment_finish_reason(self) -> FinishReason | None:
        """Finish reason of the last segment that ends in it; None if none ends."""
        return self.segment_ends[-1].finish_reason if self.segment_ends else None
