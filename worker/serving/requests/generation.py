"""One request on its way through this worker: from engine outputs to deltas for the log.

What a step gives is gathered; text is made of it when a delta is taken, of all tokens at once. Only a request with stop
strings has its text made token by token as they come: the engine must hear of one as soon as it is there, and what a
step gave behind the token that completes it is not the request's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import structlog

from ....shared.broker import Claim
from ....shared.errors import PenstockError
from ....shared.log import log_ids
from ....shared.messages.deltas import Delta, SegmentEnd
from ....shared.messages.from_core import EngineCoreOutput
from ....shared.messages.outcome import FinishReason, RequestError, TokenLogprobs, Usage
from ....shared.tracing.attributes import operation_of
from ...prediction import PredictionCursor
from ...text.encoding import tokenizing
from ...text.stop_strings import StopStrings
from ...text.tokenizer import TextCodec
from ..telling.request_timing import RequestTiming
from .segments import Segment
from .untold_text import UntoldText

T = TypeVar("T")
log = structlog.get_logger()
# What ends a segment of a resumable request; any other end is that of the whole request.
_SEGMENT_REASONS = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION})


class Generation:
    """The text side of a claimed request, whose prompt is token ids by now.

    A resumed request replays its logged tokens through detokenizer and stop strings, so both go on where the
    former engine left them; of the text only what follows the logged is given out (``untold_text.py``).

    ``expiry`` is the call that ends it at its deadline; None without one. ``num_resumed_tokens`` are output tokens that
    were there at the claim, and ``operation`` is OpenTelemetry's name for what is asked. ``weights_version`` is what
    the engine computes it with, which its first delta tells.
    """

    def __init__(self, segment: Segment, codec: TextCodec, claim: Claim, weights_version: str = "") -> None:
        request = segment.request
        params = request.sampling_params
        assert params is not None
        self.request_id = request.request_id
        self.epoch = request.epoch
        self.partition = claim.partition
        self.tenant = request.tenant
        self.attempt = claim.attempt
        self.params = params
        self.operation = operation_of(request)
        self.trace_headers = request.trace_headers
        self.ids = log_ids(request.request_id, request.external_req_id, request.trace_headers)
        self.expiry: asyncio.TimerHandle | None = None
        self.timing = RequestTiming(claim, segment.logged)
        # A segment's prompt holds the output of those before it.
        self._num_prompt_tokens = request.num_prompt_tokens - segment.num_former_tokens
        self._num_new_prompt_tokens = self._num_prompt_tokens - segment.num_former_prompt_tokens
        self._alone_until = claim.alone_until
        self._reckoned_kv_tokens = claim.num_kv_tokens
        self._next_index = segment.num_former_tokens
        self._num_cached_tokens = 0
        self._untold_version = weights_version
        self._gathered: Delta | None = None
        self._num_read = 0  # of the gathered tokens, those of which text was made
        self._may_wait = False
        self._detokenizer = None
        self._token_bytes = codec.token_bytes if params.detokenize else None
        self._first_prompt_token: tuple[int, bytes] | None = None
        if params.prompt_logprobs is not None and request.prompt_token_ids:
            first = request.prompt_token_ids[0]
            self._first_prompt_token = (first, codec.token_bytes[first])
        self._begins_in_reasoning: bool | None = None
        if request.messages is not None and params.detokenize:
            self._begins_in_reasoning = codec.ends_in_reasoning(request.prompt_token_ids or (), request.messages)
        if params.detokenize:
            self._detokenizer = codec.detokenizer(
                request.prompt_token_ids or (),
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        self._stop = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
        self._has_stop_strings = bool(params.stop_strings)
        # As in vLLM, none counts that the first ``min_tokens`` complete.
        self._num_without_stop = params.min_tokens if self._has_stop_strings else 0
        self._include_stop = params.include_stop_str_in_output
        self._predicted = Predicted(request.draft_token_ids or [], self._next_index)
        self.finished = False
        self._failure: PenstockError | None = None
        self._untold = UntoldText()
        for delta in segment.logged:
            self._untold.replay(self._text_of(delta.token_ids)[0], delta.text)
            self._next_index = delta.next_index
            self._predicted.follow(delta)
        self.num_resumed_tokens = self._next_index
        if self._failure is not None:
            raise self._failure

    @property
    def num_kv_tokens(self) -> int:
        """What it takes of the KV cache: what was reckoned at the claim, until it is known to be more."""
        return max(self._reckoned_kv_tokens, self._num_prompt_tokens + self._next_index + 1)

    @property
    def num_output_tokens(self) -> int:
        """Its output tokens, those of former engines and segments included."""
        return self._next_index

    def take_prompt(self) -> tuple[int, int]:
        """Return tokens of the prompt, and how many of them were in the cache, once its first output token is there.

        Zeros before and afterwards, and of a request that had its first token elsewhere. Of a later segment it is the
        chunk; what came before it was counted with those segments.
        """
        num_new = self._num_new_prompt_tokens
        if not num_new or not self.timing.made_first_token:
            return 0, 0
        self._num_new_prompt_tokens = 0
        return num_new, min(self._num_cached_tokens, num_new)

    @property
    def is_on_probation(self) -> bool:
        """Whether the engine shall hold no other request yet."""
        return not self.finished and self._next_index < self._alone_until

    def absorb(self, output: EngineCoreOutput) -> tuple[Delta | None, bool]:
        """Take in what a step gave, and return what is to be written at once, and whether the engine must be told to
        stop: a stop string came.

        A first token and an end, with all that was gathered before, are to be written at once; None says that what came
        may wait for ``take``.
        """
        delta = self._gather(output)
        if self._may_wait and output.finish_reason is None and self._failure is None:
            return None, False
        stopped_at = self._read(delta, num_signs=self._num_signs(output))
        if stopped_at is not None:
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, stopped_at
        elif output.finish_reason is not None:
            delta.finish_reason, delta.stop_reason = output.finish_reason, output.stop_reason
            delta.error = output.error
            delta.text += self._flush()
        if self._failure is not None:
            delta.finish_reason, delta.stop_reason = FinishReason.ERROR, None
            delta.error = RequestError(self._failure.code, str(self._failure), self._failure.retryable)
        delta.stats = self.timing.first_token()
        self._may_wait = self.timing.has_told_first_token and not self._has_stop_strings
        if delta.finish_reason is not None:
            self._end(delta)
        elif delta.stats is None:
            return None, False
        is_ended_here = stopped_at is not None or self._failure is not None
        return self.take(), is_ended_here and not output.finished

    def take(self) -> Delta | None:
        """Return what was gathered since the last delta as one; None if that is nothing."""
        delta = self._gathered
        if delta is not None:
            if not self.finished:
                self._read(delta)
                self._predicted.follow(delta)
            self._gathered, self._num_read = None, 0
        return delta

    def cut_off(self, reason: FinishReason) -> Delta:
        """Return the last delta of a request that ends before its engine says so, with the text that was held back."""
        delta = self.take() or Delta(index=self._next_index)
        delta.text += self._flush()
        delta.finish_reason = reason
        self._end(delta)
        return delta

    def _gather(self, output: EngineCoreOutput) -> Delta:
        """Add what ``output`` brings to the delta that waits."""
        token_ids, delta = output.new_token_ids, self._gathered
        if delta is None:
            delta = self._gathered = Delta(
                index=self._next_index, token_ids=token_ids, weights_version=self._untold_version
            )
            self._untold_version = ""
            if not self._next_index:
                delta.first_prompt_token = self._first_prompt_token
                delta.begins_in_reasoning = self._begins_in_reasoning
        else:
            delta.token_ids += token_ids
        self._next_index += len(token_ids)
        if output.new_logprobs:
            delta.logprobs += self._with_texts(output.new_logprobs)
        delta.pooled = output.pooled
        if output.new_prompt_logprobs:
            delta.prompt_logprobs += self._with_texts(output.new_prompt_logprobs)
        if output.num_prompt_tokens:  # with those of its images, which the core alone knows
            self._num_prompt_tokens = output.num_prompt_tokens
            self._num_new_prompt_tokens = self._num_new_prompt_tokens and output.num_prompt_tokens
        if output.num_cached_tokens > self._num_cached_tokens:  # an output without tokens (an error) does not say it
            self._num_cached_tokens = output.num_cached_tokens
        return delta

    def _with_texts(self, tokens: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Add the text of each token, which the core does not know."""
        bytes_of = self._token_bytes
        if bytes_of is None:
            return tokens
        return self._attempt(
            lambda: [
                TokenLogprobs(
                    t.token_id, t.logprob, t.rank, t.top, [bytes_of[t.token_id], *(bytes_of[i] for i, _ in t.top)]
                )
                for t in tokens
            ],
            tokens,
        )

    def _num_signs(self, output: EngineCoreOutput) -> int:
        """How many of its last tokens are no text: an end of sequence, or one of ``stop_token_ids``, is a sign."""
        is_sign = output.finish_reason == FinishReason.STOP and not self._include_stop
        return 1 if is_sign and output.new_token_ids else 0

    def _read(self, delta: Delta, num_signs: int = 0) -> str | None:
        """Make text of what of the delta that waits was not read, but its last ``num_signs``; returns a stop string."""
        end = len(delta.token_ids) - num_signs
        if self._has_stop_strings:
            return self._seek_stop(delta, end)
        text, _ = self._text_of(delta.token_ids[self._num_read : end])
        self._num_read = end
        delta.text += self._untold.take(text)
        return None

    def _seek_stop(self, delta: Delta, end: int) -> str | None:
        """``_read`` up to ``end`` token by token, and forget what follows the one that completes a stop string."""
        for index in range(self._num_read, end):
            text, stopped_at = self._text_of(delta.token_ids[index : index + 1])
            self._num_read = index + 1
            delta.text += self._untold.take(text)
            if stopped_at is not None:
                self._next_index = delta.index + self._num_read
                del delta.token_ids[self._num_read :], delta.logprobs[self._num_read :]
                return stopped_at
        return None

    def _end(self, delta: Delta) -> None:
        self.finished = True
        delta.stats = self.timing.whole(delta.next_index)
        self._predicted.follow(delta)
        counts = self._num_prompt_tokens, delta.next_index, self._num_cached_tokens
        delta.usage = Usage(*counts, *self._predicted.counts)

    def _text_of(self, token_ids: list[int]) -> tuple[str, str | None]:
        detokenizer = self._detokenizer
        if detokenizer is None:
            return "", None
        if self._num_without_stop:
            first, token_ids = token_ids[: self._num_without_stop], token_ids[self._num_without_stop :]
            self._num_without_stop -= len(first)
            before = self._stop.pass_over(self._attempt(lambda: detokenizer.add(first), ""))
            text, stopped_at = self._text_of(token_ids) if token_ids else ("", None)
            return before + text, stopped_at
        return self._stop.add(self._attempt(lambda: detokenizer.add(token_ids), ""))

    def _flush(self) -> str:
        """The text still held back at the end; a stop string that only the last character completes is cut too."""
        if self._detokenizer is None:
            return ""
        text = self._attempt(self._detokenizer.flush, "")
        text = self._stop.pass_over(text) if self._num_without_stop else self._stop.add(text)[0]
        return self._untold.take(text + self._stop.flush())

    def _attempt(self, work: Callable[[], T], otherwise: T) -> T:
        """Return what the tokenizer makes of tokens. If it fails, return ``otherwise``: the request ends with an error.

        Later tokens have no text then, since it would not follow the text before it.
        """
        if self._failure is None:
            try:
                with tokenizing():
                    return work()
            except PenstockError as error:
                log.error("request_failed", **self.ids, exc_info=error)
                self._failure = error
        return otherwise


class Predicted:
    """What of a prediction came true, as usage tells it.

    Args:
        token_ids: of the prediction; none if there is none.
        next_index: of the output's first token.
    """

    def __init__(self, token_ids: list[int], next_index: int) -> None:
        self._num_tokens = len(token_ids)
        self._cursor = PredictionCursor(token_ids)
        self._next_index = next_index

    def follow(self, delta: Delta) -> None:
        """Read what is new of ``delta``; what is behind its last token will not come any more."""
        if self._num_tokens and delta.next_index > self._next_index:
            self._cursor.follow(delta.token_ids[self._next_index - delta.index :])
            self._next_index = delta.next_index

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens of the prediction that are in the output, and others."""
        num_accepted = min(self._cursor.num_predicted, self._num_tokens)
        return num_accepted, self._num_tokens - num_accepted


class SegmentGeneration(Generation):
    """The text side of a resumable request's segment, whose end leaves the request open for more input."""

    def __init__(self, segment: Segment, codec: TextCodec, claim: Claim, weights_version: str = "") -> None:
        super().__init__(segment, codec, claim, weights_version)
        self._number = segment.number

    def absorb(self, output: EngineCoreOutput) -> tuple[Delta | None, bool]:
        """As that of the class; the end of the segment is no ``finish_reason`` of the delta, but a segment end."""
        delta, stop_core = super().absorb(output)
        reason = None if delta is None else delta.finish_reason
        if delta is not None and reason is not None and reason in _SEGMENT_REASONS:
            end = SegmentEnd(self._number, delta.next_index, reason, delta.stop_reason)
            delta.segment_ends = [end]
            delta.finish_reason = delta.stop_reason = None
        return delta, stop_core
