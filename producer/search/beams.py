"""Beam search: of all beginnings that grow by a token at a time, the best few are kept.

As vLLM has it: each beam is asked for its ``2 * beam_width`` most probable tokens, of all that follow the best
``beam_width`` go on, and what has met an end of sequence waits beside them to be compared at the end. Nothing here
knows how beams are asked.
Source: Freitag and Al-Onaizan 2017, arXiv:1702.01806; the penalty by length: Wu et al. 2016, arXiv:1609.08144.
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
from ...shared.shown import shown

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to search, in vLLM's words.

    Args:
        beam_width: how many beams go on, and how many sequences are returned. Range [1, 10].
        max_tokens: most output tokens.
        ignore_eos: an end of sequence is a token like others.
        temperature: with which one more candidate of each beam is drawn; 0 draws none. What is compared are the
            model's own log probabilities, as in vLLM.
        length_penalty: sequences are compared by the sum of their log probabilities, divided by their number of tokens,
            the prompt's included, to the power of this.
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
    def of_one_step(self) -> SamplingParams:
        """What each beam is asked for: its next token, and which are the most probable."""
        return SamplingParams(
            max_tokens=1,
            temperature=self.temperature,
            logprobs=2 * self.beam_width,
            ignore_eos=True,  # an end of sequence is told like any token
            detokenize=False,
        )


class BeamSearchSequence(msgspec.Struct, kw_only=True):
    """One sequence: ``tokens`` of prompt and output, the log probability of each output token, and their sum.

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
        """The tokens behind the prompt."""
        return self.tokens[self.num_prompt_tokens :]

    def score(self, length_penalty: float) -> float:
        """By what sequences are compared; an end of sequence counts for the sum, and not for the length."""
        num_tokens = len(self.tokens)
        if self.stop_reason is not None and self.tokens[-1] == self.stop_reason:
            num_tokens -= 1
        return self.cum_logprob / num_tokens**length_penalty


class BeamSearchOutput(msgspec.Struct):
    """What was found for one prompt: at most ``beam_width`` sequences, the best first."""

    prompt: object
    sequences: list[BeamSearchSequence]


async def search_beams(
    prompt_token_ids: list[int],
    params: BeamSearchParams,
    ask: Callable[[list[list[int]]], Awaitable[list[TokenLogprobs]]],
    *,
    eos_token_ids: Collection[int],
    max_model_len: int,
) -> list[BeamSearchSequence]:
    """Return the best sequences, without their texts.

    Args:
        ask: of the tokens of each beam, returns what may come next.
        max_model_len: most tokens of prompt and output together; 0 is no limit.
    """
    num_prompt_tokens = len(prompt_token_ids)
    beams = [BeamSearchSequence(tokens=prompt_token_ids, logprobs=[], cum_logprob=0.0)]
    beams[0].num_prompt_tokens = num_prompt_tokens
    ended: list[BeamSearchSequence] = []
    room = params.max_tokens if not max_model_len else min(params.max_tokens, max_model_len - num_prompt_tokens)
    for _ in range(room):
        grown: list[BeamSearchSequence] = []
        for beam, told in zip(beams, await ask([beam.tokens for beam in beams]), strict=True):
            for token_id, logprob in _candidates(told, 2 * params.beam_width):
                is_end = token_id in eos_token_ids and not params.ignore_eos
                (ended if is_end else grown).append(_followed_by(beam, token_id, logprob, params, is_end=is_end))
        # The order of equals is that of their beams: the same search gives the same sequences.
        beams = sorted(grown, key=lambda beam: -beam.score(params.length_penalty))[: params.beam_width]
        if not beams:
            break
    return sorted([*ended, *beams], key=lambda beam: -beam.score(params.length_penalty))[: params.beam_width]


def _candidates(told: TokenLogprobs, num_most_probable: int) -> list[tuple[int, float]]:
    """The most probable tokens, and the one that was drawn."""
    top = told.top[:num_most_probable]
    is_among = any(token_id == told.token_id for token_id, _ in top)
    return [pair for pair in (top if is_among else [*top, (told.token_id, told.logprob)]) if pair[1] > -math.inf]


def _followed_by(
    beam: BeamSearchSequence, token_id: int, logprob: float, params: BeamSearchParams, *, is_end: bool
) -> BeamSearchSequence:
    is_kept = not is_end or params.include_stop_str_in_output
    return BeamSearchSequence(
        tokens=[*beam.tokens, token_id] if is_kept else beam.tokens,
        logprobs=[*beam.logprobs, logprob],
        cum_logprob=beam.cum_logprob + logprob,
        finish_reason=FinishReason.STOP if is_end else FinishReason.LENGTH,
        stop_reason=token_id if is_end else None,
        num_prompt_tokens=beam.num_prompt_tokens,
    )
