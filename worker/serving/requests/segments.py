"""Resumable requests: what of their streamed input is to be answered now.

A segment is what is generated from one chunk. To the engine core it is a request of its own, whose prompt is all that
came before it: chunk 0, its output, chunk 1, …, and the chunk. Prefix caching finds most of that in the KV cache. The
log says which segments have ended and what of the present one is delivered, so the next owner of the request continues
wherever the former one stopped. Each segment has a claim of its own: in between nobody holds the request (decision
0023).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ....shared.errors import BrokerError, PromptTooLongError
from ....shared.messages.deltas import Delta
from ....shared.messages.requests import EngineCoreRequest
from ....shared.params.sampling import SamplingParams
from ....shared.params.seeds import derived_seed


@dataclass(frozen=True)
class Segment:
    """What to generate under a claim. A request that is not resumable has one segment.

    Args:
        request: its prompt is all that came before the segment's output.
        logged: the records that the segment has in the log already.
        number: of its chunk, from 0.
        num_former_tokens, num_former_prompt_tokens: of the segments before, output and chunks.
    """

    request: EngineCoreRequest
    logged: list[Delta]
    number: int = 0
    num_former_tokens: int = 0
    num_former_prompt_tokens: int = 0

    @property
    def output_token_ids(self) -> list[int]:
        """What of its output is in the log."""
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
        params_of_chunks: what those chunks have of their own; empty if none has any.

    Raises:
        PromptTooLongError: all before its output leaves no room for an output token.
        BrokerError: it has answered all its chunks, and should not have been claimed.
    """
    prompt = list(request.prompt_token_ids or ())
    number = start = num_former_tokens = num_former_prompt_tokens = 0
    for end, delta in enumerate(logged, start=1):
        if not delta.segment_ends:
            continue
        number = delta.segment_ends[-1].number + 1
        if number > len(chunks):
            raise BrokerError(f"the request was claimed, but has answered all its {number} chunks of input")
        prompt += itertools.chain.from_iterable(record.token_ids for record in logged[start:end])
        num_former_prompt_tokens = len(prompt) - delta.next_index
        prompt += chunks[number - 1]
        start, num_former_tokens = end, delta.next_index
    if len(prompt) >= max_model_len:
        raise PromptTooLongError(
            f"with chunk {number} of its input the request has {len(prompt)} tokens, but max_model_len is "
            f"{max_model_len}, and at least one output token must fit; begin a new request with less"
        )
    own = params_of_chunks[number - 1] if number and params_of_chunks else None
    params = _params_of(number, own, request.sampling_params)
    request = msgspec.structs.replace(request, prompt_token_ids=prompt, sampling_params=params)
    return Segment(request, logged[start:], number, num_former_tokens, num_former_prompt_tokens)


def _params_of(number: int, own: SamplingParams | None, of_request: SamplingParams | None) -> SamplingParams | None:
    """How segment ``number`` is sampled. All follows from what Redis holds, so it is the same at every engine."""
    if own is not None and own.seed is not None:
        return own
    params = own or of_request
    if params is None or of_request is None or of_request.seed is None:
        return params
    # Randomness depends on the place in the output of a segment: one seed would repeat itself in each.
    return msgspec.structs.replace(params, seed=derived_seed(of_request.seed, number))
