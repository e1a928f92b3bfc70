"""The tokens of a step that are judged for prompt_logprobs, their number, and the step that delivers them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.outcome import TokenLogprobs
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.execution.batch import InputBatch
from penstock.worker.engine.sampling import logprobs as logprobs_module
from penstock.worker.engine.sampling.logprobs import PromptRows, prompt_logprobs_of
from penstock.worker.engine.scheduling import chunking
from penstock.worker.engine.scheduling.block_pool import BlockPool
from penstock.worker.engine.scheduling.chunking import PromptRowBudget
from penstock.worker.engine.scheduling.request import Request
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.engine.scheduling.scheduler_output import SampledTokens, SchedulerOutput

VOCAB_SIZE = 13


def make_request(request_id: str, prompt: list[int], output: list[int] | None = None, **params: Any) -> Request:
    sampling_params = SamplingParams(max_tokens=None, **params)
    request = Request(request_id, prompt, sampling_params, max_model_len=100, output_token_ids=output)
    request.block_table = [0] * 7
    return request


def told(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0, 2, [])


def taken(batch: InputBatch, *work: tuple[Request, int]) -> PromptRows | None:
    output = SchedulerOutput([request for request, _ in work], [num_tokens for _, num_tokens in work])
    return batch.prompt_rows.select(batch.prepare(output))


@pytest.fixture
def batch() -> InputBatch:
    return InputBatch(max_num_seqs=4, max_model_len=100, block_size=16)


def test_all_but_the_last_token_of_a_prompt_judge_the_next_one(batch: InputBatch) -> None:
    plain, two, none = (make_request(str(k), [1, 2, 3, 4], prompt_logprobs=k) for k in (None, 2, 0))
    rows = taken(batch, (plain, 4), (two, 4), (none, 3))
    assert rows is not None
    assert rows.logit_rows.tolist() == [4, 5, 6, 8, 9, 10]
    assert rows.token_ids.tolist() == [2, 3, 4, 2, 3, 4]
    assert rows.num_logprobs.tolist() == [2, 2, 2, 0, 0, 0]
    assert rows.counts == {"2": 3, "0": 3}


def test_chunks_are_scored_in_order_and_only_once(batch: InputBatch) -> None:
    request, other = make_request("r", list(range(9)), prompt_logprobs=1), make_request("o", [1])
    rows = taken(batch, (request, 4), (other, 1))
    assert rows is not None
    # The decode is packed first.
    assert (rows.logit_rows.tolist(), rows.token_ids.tolist()) == ([1, 2, 3, 4], [1, 2, 3, 4])
    request.num_computed_tokens, request.prompt_logprobs = 4, [told(t) for t in range(1, 5)]
    rows = taken(batch, (request, 5))
    assert rows is not None
    assert (rows.logit_rows.tolist(), rows.token_ids.tolist()) == ([0, 1, 2, 3], [5, 6, 7, 8])
    # Preempted, and computed again from the beginning.
    batch.release(["r"])
    request.num_computed_tokens = 0
    assert taken(batch, (request, 4)) is None
    request.num_computed_tokens = 4
    rows = taken(batch, (request, 3))
    assert rows is not None
    assert (rows.logit_rows.tolist(), rows.token_ids.tolist()) == ([0, 1, 2], [5, 6, 7])


def test_delivered_prompt_logprobs_are_not_computed_again(batch: InputBatch) -> None:
    request = make_request("r", [1, 2, 3], prompt_logprobs=1)
    assert taken(batch, (request, 3)) is not None
    request.prompt_logprobs = None
    assert taken(batch, (request, 3)) is None
    assert taken(batch, (make_request("resumed", [1, 2, 3], [4], prompt_logprobs=1), 4)) is None
    assert taken(batch, (make_request("short", [1], prompt_logprobs=1), 1)) is None


def test_a_step_scores_at_most_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "MAX_PROMPT_ROWS", 5)
    asking, plain = make_request("a", [1] * 20, prompt_logprobs=0), make_request("p", [1] * 20)
    budget = PromptRowBudget()
    assert [budget.limit(request, n) for request, n in ((plain, 20), (asking, 3), (asking, 9), (asking, 9))] == [
        20,
        3,
        2,
        1,
    ]
    scheduler = Scheduler(BlockPool(20, 16), max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100)
    for index, request in enumerate((asking, plain, make_request("b", [1] * 7, prompt_logprobs=0))):
        request.block_table = []
        scheduler.add_request(request)
        assert request.arrival_index == index
    assert scheduler.schedule().num_new_tokens == [5, 20, 1]


def test_prompt_logprobs_are_delivered_once_with_the_first_token() -> None:
    scheduler = Scheduler(BlockPool(8, 16), max_num_seqs=2, max_num_batched_tokens=2, max_model_len=60)
    request = make_request("r", [1, 2, 3], prompt_logprobs=0)
    request.block_table = []
    scheduler.add_request(request)
    steps = [
        (SampledTokens([[]], prompt_logprobs={"r": [told(2), told(3)]}), []),
        (SampledTokens([[9]]), [EngineCoreOutput("r", [9], new_prompt_logprobs=[told(2), told(3)])]),
        (SampledTokens([[8]]), [EngineCoreOutput("r", [8])]),
    ]
    for sampled, expected in steps:
        assert scheduler.update_from_output(scheduler.schedule(), sampled) == expected


@pytest.mark.parametrize("one_by_one", [False, True])
def test_they_are_log_softmax_rank_and_the_best(one_by_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "_PIECE_ELEMENTS", 3 * VOCAB_SIZE)
    logits = 3 * torch.randn(7, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    rows = PromptRows(
        logit_rows=np.arange(7),
        token_ids=np.array([4, 0, 9, 9, 1, 12, 3]),
        num_logprobs=np.array([2, 2, 2, 0, 0, 20, 20]),
        counts={"two": 3, "none": 2, "all": 2},
    )
    expected = torch.log_softmax(logits.double(), dim=-1)
    by_request = prompt_logprobs_of(logits, rows, one_by_one=one_by_one)
    assert {request_id: len(tokens) for request_id, tokens in by_request.items()} == rows.counts
    tokens = [token for each in by_request.values() for token in each]
    assert [token.token_id for token in tokens] == rows.token_ids.tolist()
    assert [len(token.top) for token in tokens] == [2, 2, 2, 0, 0, VOCAB_SIZE, VOCAB_SIZE]
    for token, values in zip(tokens, expected, strict=True):
        assert token.logprob == pytest.approx(values[token.token_id].item(), abs=1e-6)
        assert token.rank == 1 + int((values > values[token.token_id]).sum())
        best = values.topk(len(token.top)).values.tolist()
        assert [value for _, value in token.top] == pytest.approx(best, abs=1e-6)
