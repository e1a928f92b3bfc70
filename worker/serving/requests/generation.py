"""One request in this worker: turns engine outputs into deltas for the log.

The tokens of a step are collected and decoded when a delta is popped, which records where the text of each token ends.
Only a request with stop strings is decoded as they arrive: the engine must stop as soon as a stop string is complete,
and tokens that a step generated after it are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import structlog

from ....shared.broker import Claim
from ....shared.errors import PenstockError
from ....shared.messages.core import EngineCoreOutput
from ....shared.messages.deltas import Delta, SegmentEnd
from ....shared.messages.outcome import FinishReason, RequestError, TokenLogprobs, Usage
from ....shared.process.log import log_ids
from ....shared.tracing.attributes import operation_of
from ...prediction import PredictionCursor
from ...text.detokenizer import IncrementalDetokenizer
from ...text.encoding import tokenizing
from ...text.stop_strings import StopStrings
from ...text.tokenizer import TextCodec
from ..reporting.request_timing import RequestTiming
from .segments import Segment

T = TypeVar("T")
log = structlog.get_logger()
# Reasons that end a segment of a resumable request; any other reason ends the whole request.
_SEGMENT_REASONS = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION})


class Generation:
    """The text side of a claimed request, whose prompt is already tokenized.

    A resumed request replays its logged tokens through detokenizer and stop strings, so that both continue where the
    former engine stopped. Only text that follows the logged text is sent (``UnsentText``).

    Args:
        weights_version: version of the weights that compute the request; its first delta reports it.

    Attributes:
        expiry: timer that ends the request at its deadline; None without a deadline.
        num_resumed_tokens: output tokens that were in the log at the claim.
        operation: OpenTelemetry's name for the type of request.
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
        # The prompt of a segment includes the output of the segments before it.
        self._num_prompt_tokens = request.num_prompt_tokens - segment.num_former_tokens
        self._num_new_prompt_tokens = self._num_prompt_tokens - segment.num_former_prompt_tokens
        self._alone_until = claim.alone_until
        self._estimated_kv_tokens = claim.num_kv_tokens
        self._next_index = segment.num_former_tokens
        self._num_cached_tokens = 0
        self._unsent_version = weights_version
        self._pending: Delta | None = None
        self._num_decoded = 0  # number of pending tokens that are decoded
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
        # As in vLLM, a stop string that the first ``min_tokens`` complete does not count.
        self._num_without_stop = params.min_tokens if self._has_stop_strings else 0
        self._include_stop = params.include_stop_str_in_output
        self._predicted = Predicted(request.draft_token_ids or [], self._next_index)
        self.finished = False
        self._failure: PenstockError | None = None
        self._unsent = UnsentText()
        self._replay(segment)
        self.num_resumed_tokens = self._next_index
        if self._failure is not None:
            raise self._failure

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of the KV cache that it uses: the estimate at the claim, or its actual number if that is more."""
        return max(self._estimated_kv_tokens, self._num_prompt_tokens + self._next_index + 1)

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens, including those of former engines and segments."""
        return self._next_index

    def pop_prompt_counts(self) -> tuple[int, int]:
        """Return the number of prompt tokens, and of those that were cached, once the first output token exists.

        Returns zeros before that, in later calls, and if another engine generated the first token. For a later segment
        only its chunk is counted, because earlier chunks were counted with their segments.
        """
        num_new = self._num_new_prompt_tokens
        if not num_new or not self.timing.has_generated_first_token:
            return 0, 0
        self._num_new_prompt_tokens = 0
        return num_new, min(self._num_cached_tokens, num_new)

    @property
    def is_on_probation(self) -> bool:
        """Whether the engine must run no other request yet."""
        return not self.finished and self._next_index < self._alone_until

    def absorb(self, output: EngineCoreOutput) -> tuple[Delta | None, bool]:
        """Process the output of a step. Returns the delta to write, and whether the engine must abort the request.

        A delta is returned for a first token and for an end, with all pending tokens; None if the tokens may wait for
        ``pop_delta``. The engine must abort if a stop string is complete or decoding failed.
        """
        delta = self._add_to_pending(output)
        if self._may_wait and output.finish_reason is None and self._failure is None:
            return None, False
        stopped_at = self._decode(delta, num_signs=self._num_signs(output))
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
        self._may_wait = self.timing.has_sent_first_token and not self._has_stop_strings
        if delta.finish_reason is not None:
            self._complete_final(delta)
        elif delta.stats is None:
            return None, False
        is_ended_here = stopped_at is not None or self._failure is not None
        return self.pop_delta(), is_ended_here and not output.finished

    def pop_delta(self) -> Delta | None:
        """Return the pending tokens as a delta; None if none are pending."""
        delta = self._pending
        if delta is not None:
            if not self.finished:
                self._decode(delta)
                self._predicted.follow(delta)
            self._pending, self._num_decoded = None, 0
        return delta

    def cut_off(self, reason: FinishReason) -> Delta:
        """End a request before its engine does. Returns its last delta, with the text that was held back."""
        delta = self.pop_delta() or Delta(index=self._next_index)
        delta.text += self._flush()
        delta.finish_reason = reason
        self._complete_final(delta)
        return delta

    def _replay(self, segment: Segment) -> None:
        """Continue where the log of ``segment`` ends."""
        if self._has_stop_strings:
            for delta in segment.logged:
                self._unsent.replay(self._text_of(delta.token_ids)[0], delta.text)
        else:
            # To decode all tokens in one call takes a fifth of the time, and after a death all requests are resumed.
            text, _ = self._text_of(segment.output_token_ids)
            self._unsent.replay(text, "".join(delta.text for delta in segment.logged))
        for delta in segment.logged:
            self._next_index = delta.next_index
            self._predicted.follow(delta)

    def _add_to_pending(self, output: EngineCoreOutput) -> Delta:
        """Add ``output`` to the pending delta, and return that."""
        token_ids, delta = output.new_token_ids, self._pending
        if delta is None:
            delta = self._pending = Delta(
                index=self._next_index, token_ids=token_ids, weights_version=self._unsent_version
            )
            self._unsent_version = ""
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
        if output.num_prompt_tokens:  # including image tokens, which only the core knows
            self._num_prompt_tokens = output.num_prompt_tokens
            self._num_new_prompt_tokens = self._num_new_prompt_tokens and output.num_prompt_tokens
        if output.num_cached_tokens > self._num_cached_tokens:  # an output without tokens (an error) has none
            self._num_cached_tokens = output.num_cached_tokens
        if not delta.index and token_ids:
            delta.prompt_usage = Usage(self._num_prompt_tokens, 0, self._num_cached_tokens)
        return delta

    def _with_texts(self, tokens: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Return ``tokens`` with the text of each, which the core does not know."""
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
        """Return how many of the last tokens are signs without text: an end of sequence, or a stop token id."""
        is_sign = output.finish_reason == FinishReason.STOP and not self._include_stop
        return 1 if is_sign and output.new_token_ids else 0

    def _decode(self, delta: Delta, num_signs: int = 0) -> str | None:
        """Decode the tokens of ``delta`` that are not decoded, except the last ``num_signs``.

        Returns the stop string that they complete; None if they complete none.
        """
        end = len(delta.token_ids) - num_signs
        if self._has_stop_strings:
            stopped_at = self._decode_until_stop(delta, end)
            if stopped_at is not None:
                return stopped_at
        elif self._detokenizer is not None:
            texts = self._texts_of(self._detokenizer, delta.token_ids[self._num_decoded : end])
            for index, text in enumerate(texts, self._num_decoded):
                if index:
                    delta.text_ends.append(len(delta.text))
                delta.text += self._unsent.add(text)
        self._num_decoded = end
        if num_signs and end and self._detokenizer is not None:
            delta.text_ends.append(len(delta.text))
        return None

    def _decode_until_stop(self, delta: Delta, end: int) -> str | None:
        """Decode token by token up to ``end``, and drop the tokens after one that completes a stop string."""
        for index in range(self._num_decoded, end):
            text, stopped_at = self._text_of(delta.token_ids[index : index + 1])
            self._num_decoded = index + 1
            if index:
                delta.text_ends.append(len(delta.text))
            delta.text += self._unsent.add(text)
            if stopped_at is not None:
                self._next_index = delta.index + self._num_decoded
                del delta.token_ids[self._num_decoded :], delta.logprobs[self._num_decoded :]
                return stopped_at
        return None

    def _complete_final(self, delta: Delta) -> None:
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
            first_text = self._stop.pass_over(self._attempt(lambda: detokenizer.add(first), ""))
            text, stopped_at = self._text_of(token_ids) if token_ids else ("", None)
            return first_text + text, stopped_at
        return self._stop.add(self._attempt(lambda: detokenizer.add(token_ids), ""))

    def _texts_of(self, detokenizer: IncrementalDetokenizer, token_ids: list[int]) -> list[str]:
        """Return the text of each token, without regard to stop strings."""
        return self._attempt(lambda: [detokenizer.add([token_id]) for token_id in token_ids], [""] * len(token_ids))

    def _flush(self) -> str:
        """Return the text held back at the end; a stop string that the last character completes is cut off too."""
        if self._detokenizer is None:
            return ""
        text = self._attempt(self._detokenizer.flush, "")
        text = self._stop.pass_over(text) if self._num_without_stop else self._stop.add(text)[0]
        return self._unsent.add(text + self._stop.flush())

    def _attempt(self, work: Callable[[], T], otherwise: T) -> T:
        """Return the result of ``work``, which calls the tokenizer. If it fails, return ``otherwise``.

        After a failure the request ends with an error. Later tokens get no text, since it would not follow the text
        before it.
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
    """Counter of accepted and rejected tokens of a prediction, for the usage.

    Args:
        token_ids: tokens of the prediction; empty without one.
        next_index: index of the first output token to compare.
    """

    def __init__(self, token_ids: list[int], next_index: int) -> None:
        self._num_tokens = len(token_ids)
        self._cursor = PredictionCursor(token_ids)
        self._next_index = next_index

    def follow(self, delta: Delta) -> None:
        """Compare the new tokens of ``delta`` with the prediction. Tokens must arrive in order."""
        if self._num_tokens and delta.next_index > self._next_index:
            self._cursor.follow(delta.token_ids[self._next_index - delta.index :])
            self._next_index = delta.next_index

    @property
    def counts(self) -> tuple[int, int]:
        """Number of accepted and of rejected prediction tokens."""
        num_accepted = min(self._cursor.num_predicted, self._num_tokens)
        return num_accepted, self._num_tokens - num_accepted


class SegmentGeneration(Generation):
    """The text side of a resumable request's segment, whose end leaves the request open for more input."""

    def __init__(self, segment: Segment, codec: TextCodec, claim: Claim, weights_version: str = "") -> None:
        super().__init__(segment, codec, claim, weights_version)
        self._number = segment.number

    def absorb(self, output: EngineCoreOutput) -> tuple[Delta | None, bool]:
        """Process the output of a step. The end of the segment becomes a segment end of the delta, not its end."""
        delta, stop_core = super().absorb(output)
        reason = None if delta is None else delta.finish_reason
        if delta is not None and reason is not None and reason in _SEGMENT_REASONS:
            end = SegmentEnd(self._number, delta.next_index, reason, delta.stop_reason)
            delta.segment_ends = [end]
            delta.finish_reason = delta.stop_reason = None
        return delta, stop_core


class UnsentText:
    """Text of a request that is not in the log yet, computed from the logged text and the replayed one.

    The text after a number of tokens depends on which of them were decoded together: within a character no text is
    sent, and records of the log are merged when Redis is slow. So an engine that replays the logged tokens may get less
    text than the log contains, or more.
    """

    def __init__(self) -> None:
        self._replayed = ""
        self._num_logged = 0
        self._lacks_space = False

    def replay(self, text: str, logged: str) -> None:
        """Process records of the log: the ``text`` that their tokens decode to here, and their ``logged`` text."""
        # Release 0.1 omitted the space with which the output of a SentencePiece model follows its prompt.
        if logged and not self._num_logged:
            self._lacks_space = not logged.startswith(" ")
        self._replayed += text
        self._num_logged += len(logged)

    def add(self, text: str) -> str:
        """Append ``text`` and return the part of the text that follows the logged text."""
        if not self._num_logged and not self._replayed:
            return text
        text = self._replayed + text
        if text and self._lacks_space:
            text, self._lacks_space = text.removeprefix(" "), False
        num_sent, self._num_logged = min(self._num_logged, len(text)), max(self._num_logged - len(text), 0)
        self._replayed = ""
        return text[num_sent:]
