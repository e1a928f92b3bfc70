"""vLLM's outputs as ours."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.shared.messages.outcome import FinishReason
from penstock.worker.other_engines.vllm.conversion import finish_reason_of, logprobs_of, step_stats_of


def test_logprob_columns_of_other_requests_are_dropped() -> None:
    numpy = pytest.importorskip("numpy")
    lists = (
        numpy.array([[5, 5, 7, 9], [7, 9, 7, 5]]),
        numpy.array([[-0.5, -0.5, -1.5, -2.5], [-1.5, -0.5, -1.5, -3.5]]),
        numpy.array([1, 2]),
        None,
    )
    first, second = logprobs_of(lists, 2)
    assert (first.token_id, first.logprob, first.rank, first.top) == (5, -0.5, 1, [(5, -0.5), (7, -1.5)])
    assert (second.token_id, second.logprob, second.rank, second.top) == (7, -1.5, 2, [(9, -0.5), (7, -1.5)])
    assert logprobs_of(lists, 0)[1].top == []
    assert logprobs_of(None, 2) == []


def test_its_reasons_are_ours() -> None:
    words = ("stop", "length", "abort", "error", "repetition")
    assert [finish_reason_of(word) for word in words] == list(FinishReason)[:5]
    assert finish_reason_of(None) is None


def test_a_step_of_vllm_is_converted() -> None:
    details = SimpleNamespace(
        num_ctx_requests=1, num_ctx_tokens=40, num_generation_requests=3, num_generation_tokens=3, elapsed_ms=20.0
    )
    stats = step_stats_of(details, 0.025)
    assert stats is not None
    assert (stats.num_reqs, stats.num_prefill_reqs, stats.num_prefill_tokens, stats.num_decode_tokens) == (4, 1, 40, 3)
    assert stats.execute_time_s == 0.02
    assert stats.step_time_s == pytest.approx(0.025)
    assert step_stats_of(None, 0.025) is None
