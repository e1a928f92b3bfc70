"""Log probabilities against float64, and who gets them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.shared.messages.deltas import Delta
from penstock.shared.messages.outcome import FinishReason, TokenLogprobs
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.sampling.logprobs import RawLogprobs
from penstock.worker.engine.sampling.sampler import SamplingRows, SamplingTable, sample
from penstock.worker.engine.scheduling.block_pool import BlockPool
from penstock.worker.engine.scheduling.request import Request
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.engine.scheduling.scheduler_output import SampledTokens

VOCAB_SIZE = 15
ASKED = [None, 0, 3, None, 20, 1]


def make_request(index: int, **params: Any) -> Request:
    return Request(str(index), [1, 2], SamplingParams(**params), max_model_len=50)


def rows_of(requests: list[Request]) -> SamplingRows:
    table = SamplingTable(len(requests))
    for row, request in enumerate(requests):
        table.set_row(row, request)
    return table.select(np.arange(len(requests)), np.full(len(requests), 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_of_the_raw_logits_whatever_the_sampler_does(dtype: torch.dtype) -> None:
    strong = {"temperature": 0.5, "repetition_penalty": 5.0, "min_tokens": 1, "stop_token_ids": [4], "top_k": 7}
    rows = rows_of([make_request(i, seed=i, logprobs=logprobs, **strong) for i, logprobs in enumerate(ASKED)])
    logits = 3 * torch.randn(len(ASKED), VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = torch.log_softmax(logits.double(), dim=-1)
    assert rows.num_logprobs is not None
    raw = RawLogprobs.of(logits, rows.num_logprobs)
    token_ids = sample(logits, rows)
    by_row = raw.at(token_ids)
    assert sorted(by_row) == [row for row, logprobs in enumerate(ASKED) if logprobs is not None]
    for row, token in by_row.items():
        values = expected[row]
        assert token.token_id == token_ids[row]
        assert token.logprob == pytest.approx(values[token.token_id].item(), abs=1e-6)
        assert token.rank == 1 + int((values > values[token.token_id]).sum())
        best = values.topk(min(ASKED[row] or 0, VOCAB_SIZE))
        assert [value for _, value in token.top] == pytest.approx(best.values.tolist(), abs=1e-6)
        assert [values[token_id].item() for token_id, _ in token.top] == best.values.tolist()


def test_nothing_is_computed_without_a_request_for_it() -> None:
    rows = rows_of([make_request(0), make_request(1)])
    assert rows.num_logprobs is None
    assert rows.changes == []


def test_each_goes_with_its_requests_token() -> None:
    scheduler = Scheduler(BlockPool(8, 16), max_num_seqs=4, max_num_batched_tokens=8, max_model_len=50)
    for index in range(2):
        scheduler.add_request(make_request(index))
    logprobs = TokenLogprobs(9, -0.5, 1, [])
    outputs = scheduler.update_from_output(scheduler.schedule(), SampledTokens([[8], [9]], {"1": [logprobs]}))
    assert [(output.new_token_ids, output.new_logprobs) for output in outputs] == [([8], []), ([9], [logprobs])]


def test_merged_deltas_keep_them_in_the_order_of_the_tokens() -> None:
    logprobs = [TokenLogprobs(token_id, -token_id / 2, token_id, []) for token_id in range(4)]
    first = Delta(index=0, token_ids=[0, 1], logprobs=logprobs[:2], prompt_logprobs=logprobs[1:])
    last = Delta(index=2, token_ids=[2, 3], logprobs=logprobs[2:], finish_reason=FinishReason.LENGTH)
    whole = first.followed_by(last)
    assert (whole.token_ids, whole.logprobs, whole.finish_reason) == ([0, 1, 2, 3], logprobs, "length")
    assert whole.prompt_logprobs == logprobs[1:]
