"""Segments of resumable requests, whose input is streamed in chunks.

A segment is the output that is generated from one chunk. To the engine core it is a separate request, whose prompt is
everything before that output: chunk 0, its output, chunk 1, …, and the chunk. Most of it is in the prefix cache. The
log shows which segments have ended and which tokens of the current one are delivered, so the next engine continues
where the former one stopped. Each segment is claimed separately; between two segments no engine holds the request
(ops/decisions/streaming_input.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ....shared.errors import BrokerError, PromptTooLongError
from ....shared.messages.deltas import Delta
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.sampling import SamplingParams, derived_seed


@dataclass(frozen=True)
class Segment:
    """The output to generate under a claim. A request that is not resumable has one segment.

    Args:
        request: its prompt is everything before the segment's output.
        logged: records of the segment in the log.
        number: number of its chunk, from 0.
        num_former_tokens: output tokens of the segments before.
        num_former_prompt_tokens: tokens of the chunks before.
    """

    request: EngineCoreRequest
    logged: list[Delta]
    number: int = 0
    num_former_tokens: int = 0
    num_former_prompt_tokens: int = 0

    @property
    def output_token_ids(self) -> list[int]:
        """Output tokens of the segment that are in the log."""
        return [token_id for delta in self.logged for token_id in delta.token_ids]


def current_segment(
    request: EngineCoreRequest,
    chunks: list[list[int]],
    logged: list[Delta],
    max_model_len: int,
    params_of_chunks: Sequence[SamplingParams | None] = (),
) -> Segment:
    """Return the first segment of a resumable request that has not ended.

    Args:
        request: its prompt is chunk 0.
        chunks: token ids of the chunks after that.
        logged: the request's whole log.
        params_of_chunks: sampling parameters of those chunks; empty if no chunk has any.

    Raises:
        PromptTooLongError: the tokens before its output leave no space for an output token.
        BrokerError: all chunks are answered, so the request should not have been claimed.
    """
    prompt = list(request.prompt_token_ids or ())
    number = start = num_former_tokens = num_former_prompt_tokens = 0
    for end, delta in enumerate(logged, start=1):
        if not delta.segment_ends:
            continue
        number = delta.segment_ends[-1].number + 1
        if number > len(chunks):
            raise BrokerError(f"the request was claimed, but all its {number} chunks of input are answered")
        prompt += itertools.chain.from_iterable(record.token_ids for record in logged[start:end])
        num_former_prompt_tokens = len(prompt) - delta.next_index
        prompt += chunks[number - 1]
        start, num_former_tokens = end, delta.next_index
    if len(prompt) >= max_model_len:
        raise PromptTooLongError(
            f"with chunk {number} of its input the request has {len(prompt)} tokens, but max_model_len is "
            f"{max_model_len}, and at least one output token must fit; start a new request with less input"
        )
    own = params_of_chunks[number - 1] if number and params_of_chunks else None
    params = _params_of(number, own, request.sampling_params)
    request = msgspec.structs.replace(request, prompt_token_ids=prompt, sampling_params=params)
    return Segment(request, logged[start:], number, num_former_tokens, num_former_prompt_tokens)


def _params_of(number: int, own: SamplingParams | None, of_request: SamplingParams | None) -> SamplingParams | None:
    """Return the sampling parameters of segment ``number``. They depend only on Redis, so all engines get the same."""
    if own is not None and own.seed is not None:
        return own
    params = own or of_request
    if params is None or of_request is None or of_request.seed is None:
        return params
    # Randomness depends on the position in a segment's output, so one seed would repeat in each segment.
    return msgspec.structs.replace(params, seed=derived_seed(of_request.seed, number))
