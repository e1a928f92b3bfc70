"""Rules about single tokens against transformers' processors, with each other, and draws under them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.sampling.sampler import SamplingTable, sample
from penstock.worker.engine.sampling.token_rules import BadWords
from penstock.worker.engine.scheduling.request import Request

from .tables import assert_rows_are_their_own, table_of
from .test_sampler import NUM_DRAWS, assert_distributed, exact_probabilities

VOCAB_SIZE = 37
EOS = 2
BAD_WORDS = [[5], [7, 8], [7, 7, 9], [3, 4, 3, 4], [11, 11]]
BIAS = {4: 3.5, 9: -100.0, 30: 0.25, 5: 1.0}
ALLOWED = [4, 7, 8, 9, 20, 30, 3, 20]


def make_request(output: list[int], request_id: str = "r", **params: Any) -> Request:
    sampling_params = SamplingParams(**{"max_tokens": None, "temperature": 0.0, **params})
    return Request(
        request_id,
        [7, 1, 6],
        sampling_params,
        max_model_len=300,
        eos_token_ids=frozenset({EOS}),
        output_token_ids=output,
    )


def changed(logits: torch.Tensor, table: SamplingTable, num_tokens: list[int]) -> torch.Tensor:
    """``logits``, one row for each of the table's, after all changes."""
    logits = logits.clone()
    for change in table.select(np.arange(len(logits)), np.array(num_tokens)).changes:
        logits = change.apply(logits)
    return logits


def changed_for(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """``[V]`` after all changes."""
    return changed(logits[None], table_of(request), [request.num_tokens])[0]


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def without(logits: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
    logits = logits.clone()
    logits[token_ids] = float("-inf")
    return logits


def only(logits: torch.Tensor, token_ids: list[int]) -> torch.Tensor:
    return without(logits, [token_id for token_id in range(VOCAB_SIZE) if token_id not in token_ids])


def test_bias_is_that_of_transformers() -> None:
    logits = random_logits(1)[0]
    process: Any = SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in BIAS.items()])
    expected = process(torch.tensor([[1, 2]]), logits[None].clone())[0]
    assert torch.equal(changed_for(logits, make_request([], logit_bias=BIAS)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_is_added_in_full_precision(dtype: torch.dtype) -> None:
    logits = random_logits(1).to(dtype)
    biased = changed_for(logits[0], make_request([], logit_bias={4: 0.001}))
    assert biased.dtype == torch.float32
    assert biased[4] == logits[0, 4].float() + torch.tensor(0.001)


def test_bad_words_are_those_of_transformers() -> None:
    """Over random outputs, counted token by token. transformers looks at the prompt too, which is left out here."""
    process: Any = NoBadWordsLogitsProcessor(BAD_WORDS, eos_token_id=EOS)
    rng = random.Random(1)
    num_banned: list[int] = []
    for trial in range(40):
        request = make_request([], bad_words_token_ids=BAD_WORDS)
        table = table_of(request)
        for _ in range(12):
            logits = random_logits(1, trial)
            output = torch.tensor([[0, *request.token_ids[3:]]])
            expected = process(output, logits.clone())
            actual = changed(logits, table, [request.num_tokens])
            assert torch.equal(actual, expected)
            num_banned.append(int(actual.isinf().sum()))
            token_id = rng.choice([3, 4, 7, 8, 9, 11])
            request.token_ids.append(token_id)
            table.append_tokens(np.array([0]), np.array([token_id]))
    assert {1, 2, 3} <= set(num_banned)


sequences = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6)


@settings(max_examples=300, deadline=None)
@given(sequences, st.lists(st.integers(0, 3), max_size=12), st.integers(0, 12))
def test_tokens_that_would_complete_a_forbidden_sequence_are_banned(
    bad: list[list[int]], output: list[int], num_delivered: int
) -> None:
    """Whatever a former engine had delivered, and however the sequences overlap."""
    words = BadWords(bad, output[:num_delivered])
    for token_id in output[num_delivered:]:
        words.append(token_id)
    expected = {token_id for token_id in range(4) if any([*output, token_id][-len(s) :] == s for s in bad)}
    assert set(words.banned_ids().tolist()) == expected


def test_the_prompt_completes_no_bad_word() -> None:
    logits = random_logits(1)[0]
    assert torch.equal(changed_for(logits, make_request([], bad_words_token_ids=[[6, 4]])), logits)
    assert changed_for(logits, make_request([6], bad_words_token_ids=[[6, 4]]))[4] == float("-inf")


def test_all_rules_and_penalties_together_in_vllms_order() -> None:
    logits = random_logits(1, 3)[0]
    request = make_request(
        [7, 7],
        allowed_token_ids=ALLOWED,
        bad_words_token_ids=BAD_WORDS,
        min_tokens=5,
        stop_token_ids=[20],
        logit_bias=BIAS,
        repetition_penalty=1.5,
        presence_penalty=0.5,
    )
    expected = without(only(logits, ALLOWED), [5, 8, 9, 20, EOS])
    for token_id, bias in BIAS.items():
        expected[token_id] += bias
    process: Any = RepetitionPenaltyLogitsProcessor(1.5)
    expected = process(torch.tensor([request.token_ids]), expected[None])[0]
    expected[7] -= 0.5
    torch.testing.assert_close(changed_for(logits, request), expected)


@pytest.mark.parametrize("num_output_tokens", [2, 3])
def test_ending_tokens_follow_only_after_min_tokens(num_output_tokens: int) -> None:
    logits = random_logits(1)[0]
    request = make_request([1] * num_output_tokens, min_tokens=3, stop_token_ids=[20])
    expected = without(logits, [20, EOS]) if num_output_tokens == 2 else logits
    assert torch.equal(changed_for(logits, request), expected)


@pytest.mark.parametrize(
    ("params", "output", "left"),
    [
        # Nothing is left: min_tokens gives way.
        ({"allowed_token_ids": [7, EOS], "bad_words_token_ids": [[7, 7]], "min_tokens": 9}, [7], [EOS]),
        # Only a bad word is left, and it is allowed.
        ({"allowed_token_ids": [7], "bad_words_token_ids": [[7, 7]]}, [7], [7]),
        ({"allowed_token_ids": [7, EOS], "bad_words_token_ids": [[7, 7], [7, EOS]], "min_tokens": 9}, [7], [7, EOS]),
        # Where both leave something both hold.
        ({"allowed_token_ids": [7, 8, EOS], "bad_words_token_ids": [[7, 7]], "min_tokens": 9}, [7], [8]),
    ],
)
def test_an_allowed_list_is_never_left_empty(params: dict[str, Any], output: list[int], left: list[int]) -> None:
    logits = random_logits(1)[0]
    assert torch.equal(changed_for(logits, make_request(output, **params)), only(logits, left))


def test_rows_are_added_and_removed() -> None:
    table = table_of(make_request([], logit_bias=BIAS), make_request([7], bad_words_token_ids=BAD_WORDS))
    logits = random_logits(2)
    table.append_tokens(np.array([1, 0]), np.array([7, 5]))
    assert torch.equal(changed(logits, table, [4, 5])[1], without(logits[1], [5, 8, 9]))
    assert len(table.select(np.array([0]), np.array([4])).changes) == 1
    table.set_row(0, make_request([]))
    assert torch.equal(changed(logits, table, [3, 5])[0], logits[0])
    assert table.select(np.array([0]), np.array([3])).changes == []
    table.forget_row(1)
    assert torch.equal(changed(logits, table, [3, 5]), logits)


COMBINATIONS: list[dict[str, Any]] = [
    {"logit_bias": BIAS},
    {"logit_bias": {4: 100.0, 9: 99.0}, "temperature": 0.5},
    {"logit_bias": BIAS, "temperature": 0.7, "top_p": 0.8, "min_p": 0.02},
    {"logit_bias": BIAS, "top_k": 6},
    {"allowed_token_ids": ALLOWED},
    {"allowed_token_ids": ALLOWED, "top_k": 20},
    {"allowed_token_ids": ALLOWED, "top_p": 0.5, "temperature": 2.0},
    {"allowed_token_ids": ALLOWED, "logit_bias": BIAS, "bad_words_token_ids": BAD_WORDS, "min_p": 0.1},
    {"bad_words_token_ids": BAD_WORDS, "temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.01},
    {"bad_words_token_ids": BAD_WORDS, "min_tokens": 40, "stop_token_ids": [4], "repetition_penalty": 1.3},
]
FILTERS = ("temperature", "top_k", "top_p", "min_p")


@pytest.mark.parametrize("params", COMBINATIONS, ids=lambda params: "+".join(params))
def test_draws_follow_the_rules_distribution(params: dict[str, Any]) -> None:
    request = make_request([7, 7], **{"temperature": 1.0, **params})
    logits = random_logits(1, 5)[0] / 2
    table = table_of(*[request] * NUM_DRAWS)
    # Seeds make the random numbers differ; the positions are the same, before min_tokens.
    rows = table.select(np.arange(NUM_DRAWS), np.full(NUM_DRAWS, request.num_tokens))
    rows.seeds = np.arange(NUM_DRAWS, dtype=np.uint64)
    tokens = sample(logits.expand(NUM_DRAWS, -1).clone(), rows)
    filters = {name: params[name] for name in FILTERS if name in params}
    assert_distributed(tokens, exact_probabilities(changed_for(logits, request), **filters))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_rest_of_the_batch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows = 63
    rng = random.Random(3)
    requests = [
        make_request(
            rng.choices([3, 4, 7, 8, 9, 11], k=i % 9),
            seed=i,
            **{"temperature": i % 2, **({} if i % 5 == 0 else COMBINATIONS[i % len(COMBINATIONS)])},
        )
        for i in range(num_rows)
    ]
    logits = random_logits(num_rows, 3).to(dtype)
    assert_rows_are_their_own(requests, logits, monkeypatch)
