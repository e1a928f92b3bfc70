"""Output of a worker process for a client: the records of a request's log, which are also sent on its channel."""

from __future__ import annotations

import msgspec

from ..errors import ValidationError
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
    ``text_ends`` has, for each token but the last, the number of characters of ``text`` up to its end, so that a reader
    can begin at any token. Workers before 0.2 did not write it; nor is it written for output without text.
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
    text_ends: list[int] = []

    def extend(self, later: Delta) -> None:
        """Append the next delta to this one in place, as ``followed_by`` would, but without a copy."""
        if later.token_ids:
            num_chars = len(self.text)
            if self.token_ids:
                self.text_ends.append(num_chars)
            if later.text_ends:
                self.text_ends += [num_chars + end for end in later.text_ends]
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
        whole = msgspec.structs.replace(
            self,
            token_ids=list(self.token_ids),
            logprobs=list(self.logprobs),
            prompt_logprobs=list(self.prompt_logprobs),
            segment_ends=list(self.segment_ends),
            text_ends=list(self.text_ends),
        )
        whole.extend(later)
        return whole

    def split(self, index: int) -> tuple[Delta, Delta]:
        """Return the tokens before output token ``index``, with their text, and the rest, with the end.

        Args:
            index: of a token of this delta, but not of its first.

        Raises:
            ValidationError: a worker before 0.2 wrote the delta, without the text of each token.
        """
        number = index - self.index
        if self.text and len(self.text_ends) != len(self.token_ids) - 1:
            raise ValidationError(
                f"after={index - 1} is inside the delta of tokens {self.index} to {self.next_index - 1}, which a "
                "worker of an older version wrote without the text of each token; pass next_index - 1 of a delta"
            )
        num_chars = self.text_ends[number - 1] if self.text else 0
        head = Delta(
            index=self.index,
            token_ids=self.token_ids[:number],
            text=self.text[:num_chars],
            logprobs=self.logprobs[:number],
            prompt_logprobs=self.prompt_logprobs,
            child=self.child,
            first_prompt_token=self.first_prompt_token,
            weights_version=self.weights_version,
            begins_in_reasoning=self.begins_in_reasoning,
            prompt_usage=self.prompt_usage,
            text_ends=self.text_ends[: number - 1],
        )
        rest = msgspec.structs.replace(
            self,
            index=index,
            token_ids=self.token_ids[number:],
            text=self.text[num_chars:],
            logprobs=self.logprobs[number:],
            prompt_logprobs=[],
            first_prompt_token=None,
            begins_in_reasoning=None,
            prompt_usage=None,
            text_ends=[end - num_chars for end in self.text_ends[number:]],
        )
        return head, rest

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
