"""Beam search: extend sequences one token at a time, and keep the best.

As in vLLM, each beam gets its ``2 * beam_width`` most probable tokens, the best ``beam_width`` sequences continue, and
sequences that reach an end of sequence are set aside until the end. This module does not depend on how tokens are
requested.
Source: Freitag and Al-Onaizan 2017, arXiv:1702.01806; length penalty: Wu et al. 2016, arXiv:1609.08144.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import msgspec

from ...shared.errors import ValidationError
from ...shared.messages.outcome import FinishReason, TokenLogprobs
from ...shared.params.checks import check_number
from ...shared.params.sampling import MAX_LOGPROBS, SamplingParams
from ...shared.values.shown import shown

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a search, with vLLM's names.

    Args:
        beam_width: number of beams that continue, and of sequences returned. Range [1, 10].
        max_tokens: limit of output tokens.
        ignore_eos: treat an end of sequence like any token.
        temperature: of one more candidate that is sampled per beam; 0 samples none. Sequences are compared by the
            model's own log probabilities, as in vLLM.
        length_penalty: sequences are compared by the sum of their log probabilities, divided by the number of tokens
            (including the prompt) to the power of this.
        include_stop_str_in_output: keep the end of sequence among the tokens.

    Raises:
        ValidationError: a value has the wrong type or range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        check_number("beam_width", self.beam_width, int, 1, MAX_BEAM_WIDTH)
        check_number("max_tokens", self.max_tokens, int, 1, 2**31 - 1)
        check_number("temperature", self.temperature, float, 0.0, 100.0)
        check_number("length_penalty", self.length_penalty, float, -20.0, 20.0)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            value: Any = getattr(self, name)
            if not isinstance(value, bool):
                raise ValidationError(f"{name} must be True or False, got {shown(value)}")

    @property
    def step_params(self) -> SamplingParams:
        """Sampling parameters of one step: the next token, and the most probable ones."""
        return SamplingParams(
            max_tokens=1,
            temperature=self.temperature,
            logprobs=2 * self.beam_width,
            ignore_eos=True,  # an end of sequence is returned like any token
            detokenize=False,
        )


class BeamSearchSequence(msgspec.Struct, kw_only=True):
    """A sequence: ``tokens`` of prompt and output, the log probability of each output token, and their sum.

    ``text`` is that of the output. ``finish_reason`` is "stop" at an end of sequence, whose id is ``stop_reason``.
    """

    tokens: list[int]
    logprobs: list[float]
    cum_logprob: float
    text: str = ""
    finish_reason: FinishReason = FinishReason.LENGTH
    stop_reason: int | None = None
    num_prompt_tokens: int = 0

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.num_prompt_tokens :]

    def score(self, length_penalty: float) -> float:
        """Return the value by which sequences are compared. An end of sequence counts for the sum, but not for the
        length."""
        num_tokens = len(self.tokens)
        if self.stop_reason is not None and self.tokens[-1] == self.stop_reason:
            num_tokens -= 1
        return self.cum_logprob / num_tokens**length_penalty


class BeamSearchOutput(msgspec.Struct):
    """Result for one prompt: at most ``beam_width`` sequences, the best first."""

    prompt: object
    sequences: list[BeamSearchSequence]


async def search_beams(
    prompt_token_ids: list[int],
    params: BeamSearchParams,
    next_tokens: Callable[[list[list[int]]], Awaitable[list[TokenLogprobs]]],
    *,
    eos_token_ids: Collection[int],
    max_model_len: int,
) -> list[BeamSearchSequence]:
    """Return the best sequences, without their texts.

    Args:
        next_tokens: returns the candidates for the next token of each beam, given the tokens of the beams.
        max_model_len: limit of prompt and output tokens together; 0 without a limit.
    """
    num_prompt_tokens = len(prompt_token_ids)
    beams = [BeamSearchSequence(tokens=prompt_token_ids, logprobs=[], cum_logprob=0.0)]
    beams[0].num_prompt_tokens = num_prompt_tokens
    ended: list[BeamSearchSequence] = []
    num_steps = params.max_tokens if not max_model_len else min(params.max_tokens, max_model_len - num_prompt_tokens)
    for _ in range(num_steps):
        grown: list[BeamSearchSequence] = []
        for beam, token in zip(beams, await next_tokens([beam.tokens for beam in beams]), strict=True):
            for token_id, logprob in _candidates(token, 2 * params.beam_width):
                is_end = token_id in eos_token_ids and not params.ignore_eos
                (ended if is_end else grown).append(_extended(beam, token_id, logprob, params, is_end=is_end))
        # Equal scores keep the order of their beams, so that the same search gives the same sequences.
        beams = sorted(grown, key=lambda beam: -beam.score(params.length_penalty))[: params.beam_width]
        if not beams:
            break
    return sorted([*ended, *beams], key=lambda beam: -beam.score(params.length_penalty))[: params.beam_width]


def _candidates(token: TokenLogprobs, num_most_probable: int) -> list[tuple[int, float]]:
    """Return the most probable tokens, and the sampled one."""
    top = token.top[:num_most_probable]
    is_listed = any(token_id == token.token_id for token_id, _ in top)
    return [pair for pair in (top if is_listed else [*top, (token.token_id, token.logprob)]) if pair[1] > -math.inf]


def _extended(
    beam: BeamSearchSequence, token_id: int, logprob: float, params: BeamSearchParams, *, is_end: bool
) -> BeamSearchSequence:
    is_included = not is_end or params.include_stop_str_in_output
    return BeamSearchSequence(
        tokens=[*beam.tokens, token_id] if is_included else beam.tokens,
        logprobs=[*beam.logprobs, logprob],
        cum_logprob=beam.cum_logprob + logprob,
        finish_reason=FinishReason.STOP if is_end else FinishReason.LENGTH,
        stop_reason=token_id if is_end else None,
        num_prompt_tokens=beam.num_prompt_tokens,
    )
