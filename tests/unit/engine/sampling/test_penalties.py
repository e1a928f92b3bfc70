"""Penalties against transformers' processor, the formula over a whole vocabulary, and draws with them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.execution.batch import InputBatch
from penstock.worker.engine.sampling.sampler import SamplingTable, sample
from penstock.worker.engine.scheduling.request import Request
from penstock.worker.engine.scheduling.scheduler_output import SchedulerOutput

from .tables import assert_rows_are_their_own, table_of
from .test_sampler import NUM_DRAWS, assert_distributed, exact_probabilities

VOCAB_SIZE = 41
ALL_THREE = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": -0.4}
PENALTIES = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.5},
    {"presence_penalty": -2},
    {"frequency_penalty": 0.6},
    ALL_THREE,
]


def make_request(request_id: str, prompt: list[int], output: list[int], **params: Any) -> Request:
    sampling_params = SamplingParams(**{"max_tokens": None, "temperature": 0.0, **params})
    return Request(request_id, prompt, sampling_params, max_model_len=300, output_token_ids=output)


def penalised(logits: torch.Tensor, table: SamplingTable) -> torch.Tensor:
    """``logits``, one row for each of the table's."""
    changes = table.select(np.arange(len(logits)), np.ones(len(logits), np.int64)).changes
    logits = logits.clone()
    for change in changes:
        logits = change.apply(logits)
    return logits


def processed(process: Any, request: Request, logits: torch.Tensor) -> torch.Tensor:
    """Return ``[V]`` after one of transformers' processors, whose type hints are narrower than the types that they
    accept.
    """
    return process(torch.tensor([request.token_ids]), logits[None].clone())[0]


def formula(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """OpenAI's formula for presence and frequency, after transformers' repetition penalty; ``[V]``."""
    params = request.params
    if params.repetition_penalty != 1:
        logits = processed(RepetitionPenaltyLogitsProcessor(params.repetition_penalty), request, logits)
    output = torch.tensor(request.token_ids[request.num_prompt_tokens :], dtype=torch.long)
    counts = torch.bincount(output, minlength=len(logits))
    return logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def random_tokens(rng: random.Random, count: int) -> list[int]:
    """With repeats, and some tokens that never come."""
    return rng.choices(range(3, VOCAB_SIZE - 5), k=count)


@pytest.mark.parametrize("params", PENALTIES, ids=str)
@pytest.mark.parametrize(("num_prompt", "num_output"), [(1, 0), (9, 1), (3, 63), (100, 7)])
def test_logits_are_those_of_the_formula(params: dict[str, Any], num_prompt: int, num_output: int) -> None:
    rng = random.Random(num_output)
    requests = [
        make_request(
            str(i), random_tokens(rng, num_prompt), random_tokens(rng, num_output), **(params if i % 2 else {})
        )
        for i in range(7)
    ]
    logits = 5 * torch.randn(7, VOCAB_SIZE, generator=torch.Generator().manual_seed(num_prompt))
    logits[:, 5] = float("-inf")
    expected = torch.stack([formula(*pair) for pair in zip(logits, requests, strict=True)])
    torch.testing.assert_close(penalised(logits, table_of(*requests)), expected)


def test_repetition_alone_has_the_bits_of_transformers() -> None:
    rng = random.Random(0)
    request = make_request("r", random_tokens(rng, 30), random_tokens(rng, 30), repetition_penalty=1.37)
    logits = 5 * torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    assert torch.equal(penalised(logits, table_of(request))[0], formula(logits[0], request))


def test_counting_token_by_token_is_counting_all_at_once() -> None:
    """Whatever was delivered by a former engine, rows that come and go included."""
    rng = random.Random(1)
    prompt, output = random_tokens(rng, 12), random_tokens(rng, 40)
    logits = 5 * torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    whole = [penalised(logits, table_of(make_request("r", prompt, output[:n], **ALL_THREE))) for n in range(41)]
    for num_delivered in range(0, 41, 5):
        table = table_of(make_request("r", prompt, output[:num_delivered], **ALL_THREE))
        for n in range(num_delivered, 41):
            assert torch.equal(penalised(logits, table), whole[n])
            if n < 40:
                table.append_tokens(np.array([0]), np.array([output[n]]))


def test_the_batch_counts_tokens_and_forgets_removed_requests() -> None:
    batch = InputBatch(max_num_seqs=2, max_model_len=300, block_size=16)
    plain, other = make_request("plain", [1], []), make_request("other", [5, 6], [6], **ALL_THREE)
    for request in (plain, other):
        request.block_table = [0]
    step = batch.prepare(SchedulerOutput([plain, other], [1, 3]))
    batch.append_tokens(step.rows, np.array([7, 9]))
    other.token_ids.append(9)
    logits = torch.randn(2, VOCAB_SIZE)
    rows = batch.sampling.select(step.rows, step.seq_lens)
    (penalties,) = rows.changes
    sampled = penalties.apply(logits.clone())
    assert torch.equal(sampled[0], logits[0])
    torch.testing.assert_close(sampled[1], formula(logits[1], other))
    assert batch.sampling.select(step.rows[:1], step.seq_lens[:1]).changes == []
    batch.release(["other"])
    assert batch.sampling.select(step.rows, step.seq_lens).changes == []


def test_as_many_tokens_as_the_request_may_have_are_counted() -> None:
    request = make_request("r", [3], [4], max_tokens=30, **ALL_THREE)
    table = table_of(request)
    for token_id in range(10, 39):
        table.append_tokens(np.array([0]), np.array([token_id]))
        request.token_ids.append(token_id)
    logits = torch.randn(1, VOCAB_SIZE)
    torch.testing.assert_close(penalised(logits, table)[0], formula(logits[0], request))


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.6, "top_p": 0.9}, {"top_k": 9}], ids=str)
def test_draws_follow_the_penalised_distribution(filters: dict[str, Any]) -> None:
    rng = random.Random(2)
    request = make_request(
        "r", random_tokens(rng, 9), random_tokens(rng, 9), **ALL_THREE, **{"temperature": 1, **filters}
    )
    table = table_of(*[request] * NUM_DRAWS)
    logits = 2 * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    # Positions make the random numbers differ.
    rows = table.select(np.arange(NUM_DRAWS), np.arange(NUM_DRAWS) + request.num_prompt_tokens)
    tokens = sample(logits.expand(NUM_DRAWS, -1).clone(), rows)
    assert_distributed(tokens, exact_probabilities(formula(logits, request), **filters))


def test_a_greedy_row_takes_the_best_of_the_penalised() -> None:
    request = make_request("r", [1], [4, 4, 6], frequency_penalty=0.6)
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, 3.0, 2.0, 2.5]])
    rows = table_of(request).select(np.array([0]), np.array([4]))
    assert sample(logits, rows).tolist() == [5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_penalised_token_does_not_depend_on_the_rest_of_the_batch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows = 63
    rng = random.Random(3)
    kinds = [{}, ALL_THREE, {"presence_penalty": 2.0, "temperature": 1.0}, {"repetition_penalty": 3.0, "top_k": 4}]
    requests = [
        make_request(str(i), random_tokens(rng, 5), random_tokens(rng, i), seed=i, min_tokens=40, **kinds[i % 4])
        for i in range(num_rows)
    ]
    logits = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert_rows_are_their_own(requests, logits, monkeypatch)
