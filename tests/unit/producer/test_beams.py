"""The search itself, against a plain reference over made-up models whose every distribution is known."""

from __future__ import annotations

import math
import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.producer.beam_search import BeamSearchParams, search_beams
from penstock.shared.errors import ValidationError
from penstock.shared.messages.outcome import TokenLogprobs

VOCAB_SIZE, EOS = 30, 3
PROMPT = [7, 8, 9]


def log_probabilities(model: int, tokens: tuple[int, ...]) -> list[float]:
    """Return the log probabilities of each token behind ``tokens``; ends of sequence are likely."""
    drawn = random.Random(f"{model} {tokens}")
    weights = [drawn.random() ** 3 + (0.5 if token_id == EOS else 0.0) for token_id in range(VOCAB_SIZE)]
    return [math.log(weight / sum(weights)) for weight in weights]


def reference(model: int, params: BeamSearchParams) -> list[tuple[float, tuple[int, ...], tuple[int, ...]]]:
    """Score, prompt with output, and output with its end: every continuation of every beam is looked at."""
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended = []
    for _ in range(params.max_tokens):
        everything = []
        for total, output in beams:
            following = log_probabilities(model, (*PROMPT, *output))
            ranked = sorted(range(VOCAB_SIZE), key=lambda token_id: -following[token_id])  # used at once
            for token_id in ranked[: 2 * params.beam_width]:
                pair = total + following[token_id], (*output, token_id)
                (ended if token_id == EOS and not params.ignore_eos else everything).append(pair)
        beams = sorted(everything, key=lambda pair: -pair[0])[: params.beam_width]
    results = []
    for total, output in [*ended, *beams]:
        is_end = output[-1] == EOS and not params.ignore_eos
        bare = output[:-1] if is_end else output
        score = total / (len(PROMPT) + len(bare)) ** params.length_penalty
        results.append((score, (*PROMPT, *(output if params.include_stop_str_in_output else bare)), output))
    return sorted(results, key=lambda one: -one[0])[: params.beam_width]


@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([0.0, 0.6, 1.0, 1.5]),
    st.booleans(),
)
async def test_the_sequences_are_those_of_the_reference(
    model: int, beam_width: int, max_tokens: int, ignore_eos: bool, length_penalty: float, is_end_kept: bool
) -> None:
    params = BeamSearchParams(
        beam_width=beam_width,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        length_penalty=length_penalty,
        include_stop_str_in_output=is_end_kept,
    )
    num_asked = params.step_params.logprobs
    assert num_asked is not None

    @cache
    def told(tokens: tuple[int, ...]) -> TokenLogprobs:
        following = log_probabilities(model, tokens)
        ranked = sorted(range(VOCAB_SIZE), key=lambda token_id: -following[token_id])
        top = [(token_id, following[token_id]) for token_id in ranked[:num_asked]]
        return TokenLogprobs(*top[0], 1, top)

    async def ask(beams: list[list[int]]) -> list[TokenLogprobs]:
        return [told(tuple(beam)) for beam in beams]

    results = await search_beams(list(PROMPT), params, ask, eos_token_ids={EOS}, max_model_len=0)
    expected = reference(model, params)
    assert [tuple(one.tokens) for one in results] == [tokens for _, tokens, _ in expected]
    for one, (score, tokens, output) in zip(results, expected, strict=True):
        assert one.score(length_penalty) == pytest.approx(score)
        assert one.cum_logprob == pytest.approx(math.fsum(one.logprobs))
        assert len(one.logprobs) == len(output)
        assert one.output_token_ids == list(tokens[len(PROMPT) :])
        is_end = output[-1] == EOS and not ignore_eos
        assert (one.finish_reason, one.stop_reason) == (("stop", EOS) if is_end else ("length", None))


@pytest.mark.parametrize("length_penalty", [-20.0, 20.0])
async def test_the_bounds_of_the_penalty_hold_for_the_longest_prompts(length_penalty: float) -> None:
    async def ask(beams: list[list[int]]) -> list[TokenLogprobs]:
        return [TokenLogprobs(5, -0.5, 1, [(5, -0.5), (6, -1.0)]) for _ in beams]

    params = BeamSearchParams(beam_width=1, max_tokens=2, length_penalty=length_penalty)
    (beam,) = await search_beams([7] * 1_000_000, params, ask, eos_token_ids=(), max_model_len=0)
    assert beam.output_token_ids == [5, 5]
    assert beam.score(length_penalty) < 0
    with pytest.raises(ValidationError, match="length_penalty must be in"):
        BeamSearchParams(beam_width=1, max_tokens=2, length_penalty=1.1 * length_penalty)


async def test_the_models_length_ends_a_search_and_a_drawn_token_is_one_more_candidate() -> None:
    prompts: list[int] = []

    async def ask(beams: list[list[int]]) -> list[TokenLogprobs]:
        prompts.append(len(beams))
        return [TokenLogprobs(20, -5.0, 9, [(5, -0.5), (6, -1.0)]) for _ in beams]

    params = BeamSearchParams(beam_width=1, max_tokens=50, temperature=1.0)
    (beam,) = await search_beams(list(PROMPT), params, ask, eos_token_ids={5}, max_model_len=5)
    assert prompts == [1, 1]
    assert (beam.output_token_ids, beam.stop_reason) == ([], 5)
    params = BeamSearchParams(beam_width=1, max_tokens=50, temperature=1.0, length_penalty=-8.0)
    (beam,) = await search_beams(list(PROMPT), params, ask, eos_token_ids={5, 6}, max_model_len=5)
    assert beam.stop_reason == 5, "20 was drawn, and goes on, but is too unlikely"
    assert prompts == [1] * 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width must be in"),
        ({"beam_width": 11}, r"beam_width must be in \[1, 10\], got 11"),
        ({"max_tokens": 0}, "max_tokens must be in"),
        ({"temperature": -1}, "temperature must be in"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False"),
    ],
)
def test_wrong_parameters_are_named(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **fields})  # type: ignore[arg-type]  # the mistake
