"""One request on its way through this worker: from engine outputs to deltas for the log."""

from __future__ import annotations

import asyncio

from ...shared.broker import Claim
from ...shared.messages import Delta, EngineCoreOutput, FinishReason, SegmentEnd, Usage
from ..text.stop_strings import StopStrings
from ..text.tokenizer import TextCodec
from .request_timing import RequestTiming
from .segments import Segment

# What ends a segment of a resumable request; any other end is that of the whole request.
_SEGMENT_REASONS = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION})


class Generation:
    """The text side of a claimed request, whose prompt is token ids by now.

    A resumed request replays its logged tokens through detokenizer and stop strings, so both go on where the
    former engine left them; text it had logged is not given out again.

    ``expiry`` is the call that ends it at its deadline; None without one.
    """

    def __init__(self, segment: Segment, codec: TextCodec, claim: Claim) -> None:
        request = segment.request
        params = request.sampling_params
        assert params is not None
        self.request_id = request.request_id
        self.epoch = request.epoch
        self.expiry: asyncio.TimerHandle | None = None
        self.timing = RequestTiming(claim, segment.logged)
        # A segment's prompt holds the output of those before it.
        self._num_prompt_tokens = request.num_prompt_tokens - segment.num_former_tokens
        self._alone_until = claim.alone_until
        self._reckoned_kv_tokens = claim.num_kv_tokens
        self._next_index = segment.num_former_tokens
        self._num_cached_tokens = 0
        self._detokenizer = None
        if params.detokenize:
            self._detokenizer = codec.detokenizer(
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        self._stop = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
        self._include_stop = params.include_stop_str_in_output
        self.finished = False
        for delta in segment.logged:
            self._text_of(delta.token_ids)
            self._next_index = delta.next_index

    @property
    def num_kv_tokens(self) -> int:
        """What it takes of the KV cache: what was reckoned at the claim, until it is known to be more."""
        return max(self._reckoned_kv_tokens, self._num_prompt_tokens + self._next_index + 1)

    @property
    def is_on_probation(self) -> bool:
        """Whether the engine shall hold no other request yet."""
        return not self.finished and self._next_index < self._alone_until

    def absorb(self, output: EngineCoreOutput) -> tuple[Delta, bool]:
        """Return the delta that ``output`` adds, and whether the engine must be told to stop: a stop string came."""
        delta = Delta(
            index=self._next_index,
            token_ids=output.new_token_ids,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            error=output.error,
            logprobs=output.new_logprobs,
            prompt_logprobs=output.new_prompt_logprobs,
        )
        # The token that ended it (end of sequence, or one of stop_token_ids) is a sign, not text.
        is_sign = output.finish_reason == FinishReason.STOP and not self._include_stop
        delta.text, stopped_at = self._text_of(output.new_token_ids[:-1] if is_sign else output.new_token_ids)
        if stopped_at is not None:
            delta.finish_reason, delta.stop_reason = FinishReason.STOP, stopped_at
        elif delta.finish_reason is not None:
            delta.text += self._flush()
        self._next_index = delta.next_index
        # An output without tokens (an error) does not say it.
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        delta.stats = self.timing.first_token()
        if delta.finish_reason is not None:
            self._end(delta)
        return delta, stopped_at is not None and not output.finished

    def cut_off(self, reason: FinishReason) -> Delta:
        """Return the last delta of a request that ends before its engine says so, with the text that was held back."""
        delta = Delta(index=self._next_index, text=self._flush(), finish_reason=reason)
        self._end(delta)
        return delta

    def _end(self, delta: Delta) -> None:
        self.finished = True
        delta.stats = self.timing.whole(delta.next_index)
        delta.usage = Usage(self._num_prompt_tokens, delta.next_index, self._num_cached_tokens)

    def _text_of(self, token_ids: list[int]) -> tuple[str, str | None]:
        if self._detokenizer is None:
            return "", None
        return self._stop.add(self._detokenizer.add(token_ids))

    def _flush(self) -> str:
        """The text still held back at the end; a stop string that only the last character completes is cut too."""
        if self._detokenizer is None:
            return ""
        text, _ = self._stop.add(self._detokenizer.flush())
        return text + self._stop.flush()


class SegmentGeneration(Generation):
    """The text side of a resumable request's segment, whose end leaves the request open for more input."""

    def __init__(self, segment: Segment, codec: TextCodec, claim: Claim) -> None:
        super().__init__(segment, codec, claim)
        self._number = segment.number

    def absorb(self, output: EngineCoreOutput) -> tuple[Delta, bool]:
        """As that of the class; the end of the segment is no ``finish_reason`` of the delta, but a segment end."""
        delta, stop_core = super().absorb(output)
        reason = delta.finish_reason
        if reason is not None and reason in _SEGMENT_REASONS:
            end = SegmentEnd(self._number, delta.next_index, reason, delta.stop_reason)
            delta.segment_ends = [end]
            delta.finish_reason = delta.stop_reason = None
        return delta, stop_core
