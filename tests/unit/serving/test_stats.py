"""The times of a request, and an engine's sums of them."""

from __future__ import annotations

import time

import pytest

from penstock.shared.broker import Claim
from penstock.shared.messages.core import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput
from penstock.shared.messages.deltas import Delta, SegmentEnd
from penstock.shared.messages.outcome import FinishReason, Usage
from penstock.shared.stats import EngineStats, Histogram, RequestStats, StepStats
from penstock.worker.serving.reporting.engine_meter import EngineMeter
from penstock.worker.serving.reporting.request_timing import RequestTiming

SCHEDULED, PREEMPTED = EngineCoreEventType.SCHEDULED, EngineCoreEventType.PREEMPTED


def claim(waited_ms: int = 0, attempt: int = 1) -> Claim:
    return Claim("r", b"", epoch=attempt, num_logged_tokens=0, attempt=attempt, waited_ms=waited_ms)


def output(token_ids: list[int], *events: tuple[EngineCoreEventType, float]) -> EngineCoreOutput:
    return EngineCoreOutput("r", token_ids, events=[EngineCoreEvent(kind, at) for kind, at in events])


def test_the_parts_of_a_request_s_time_add_up() -> None:
    timing = RequestTiming(claim(waited_ms=2000), [])
    now = time.monotonic()
    assert timing.note_output(output([5], (SCHEDULED, now + 1)), now + 4) is None
    first = timing.first_token()
    assert first is not None
    assert 3 <= first.queue_time_s < 60  # with the time of this test itself
    assert first.prefill_time_s == pytest.approx(3)
    assert first.time_to_first_token_s == pytest.approx(first.queue_time_s + first.prefill_time_s)
    assert timing.first_token() is None, "it is told once"
    assert timing.note_output(output([6]), now + 5) == pytest.approx(1)
    assert timing.note_output(output([7], (PREEMPTED, now + 6), (SCHEDULED, now + 7)), now + 10) == pytest.approx(5)
    whole = timing.whole(num_output_tokens=3)
    assert whole.decode_time_s == pytest.approx(6)
    assert whole.inter_token_latency_s == pytest.approx(3)
    assert (whole.queue_time_s, whole.prefill_time_s) == (first.queue_time_s, first.prefill_time_s)
    assert (whole.num_preemptions, whole.num_deliveries) == (1, 1)


def test_a_resumed_request_keeps_the_time_of_its_first_token() -> None:
    stats = RequestStats(queue_time_s=0.5, prefill_time_s=0.25, time_to_first_token_s=0.75, latency_s=0.75)
    logged = [Delta(token_ids=[5], stats=stats), Delta(index=1, token_ids=[6])]
    timing = RequestTiming(claim(waited_ms=10_000, attempt=2), logged)
    timing.note_output(output([7], (SCHEDULED, time.monotonic())), time.monotonic())
    assert timing.first_token() is None
    whole = timing.whole(num_output_tokens=3)
    assert (whole.queue_time_s, whole.prefill_time_s, whole.time_to_first_token_s) == (0.5, 0.25, 0.75)
    assert 10 - 0.75 <= whole.decode_time_s < 60
    assert whole.num_deliveries == 2


def test_a_request_that_never_ran_has_spent_its_life_in_the_queue() -> None:
    whole = RequestTiming(claim(waited_ms=3000), []).whole(num_output_tokens=0)
    assert 3 <= whole.queue_time_s == whole.latency_s < 60
    assert (whole.prefill_time_s, whole.decode_time_s, whole.time_to_first_token_s) == (0, 0, 0)


def test_a_histogram_knows_its_quantiles_by_bucket() -> None:
    histogram = Histogram.empty((1.0, 2.0, 4.0))
    assert histogram.quantile(0.5) == 0
    for value in (0.5, 1.0, 1.5, 3.0, 9.0):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1, 1]
    assert (histogram.count, histogram.sum) == (5, 15)
    assert [histogram.quantile(share) for share in (0.4, 0.5, 0.8, 1.0)] == [1, 2, 4, float("inf")]


def test_an_engine_adds_up_its_steps_and_requests() -> None:
    meter = EngineMeter()
    meter.record_step(StepStats(3, 1, 10, 2, 0.001, 0.02, 0.002))
    meter.record_step(StepStats(2, 0, 0, 2, 0.001, 0.01, 0.002))
    stats = meter.stats
    assert (stats.num_steps, stats.num_prefill_tokens, stats.num_decode_tokens) == (2, 10, 4)
    assert stats.execute_time_s == pytest.approx(0.03)
    assert stats.step_time_s.sum == pytest.approx(0.036)
    meter.count_prompt("t", 8, 4)
    meter.count_tokens(1, [])
    meter.count_delta(Delta(token_ids=[1], stats=RequestStats(queue_time_s=0.2, time_to_first_token_s=0.3)))
    meter.count_tokens(1, [0.02])
    assert (stats.num_prompt_tokens, stats.num_output_tokens, stats.num_cached_tokens) == (8, 2, 4), "before its end"
    meter.count_delta(Delta(index=1, token_ids=[2]))
    end = RequestStats(prefill_time_s=0.1, decode_time_s=2.0, inter_token_latency_s=2.0, latency_s=2.5)
    meter.count_delta(Delta(index=2, finish_reason=FinishReason.STOP, stats=end, usage=Usage(8, 2, 4)))
    assert stats.num_finished == {"stop": 1}
    assert (stats.num_prompt_tokens, stats.num_output_tokens, stats.num_cached_tokens) == (8, 2, 4)
    assert (stats.num_prompt_tokens_of.sum, stats.num_output_tokens_of.sum) == (8, 2)
    assert (stats.inference_time_s.sum, stats.token_time_s.sum) == (pytest.approx(2.1), 2.0)
    assert (stats.num_step_tokens.count, stats.num_step_tokens.sum) == (2, 14)
    counts = {name: getattr(stats, name).count for name in ("queue_time_s", "decode_time_s", "latency_s")}
    assert counts == {"queue_time_s": 1, "decode_time_s": 1, "latency_s": 1}
    assert stats.time_to_first_token_s.sum == pytest.approx(0.3)
    meter.count_delta(Delta(token_ids=[3], segment_ends=[SegmentEnd(0, 3, FinishReason.STOP)], stats=end))
    assert stats.num_finished == {"stop": 1}
    assert stats.latency_s.count == 2


def test_tokens_of_one_step_have_no_time_between_them() -> None:
    meter = EngineMeter()
    meter.count_tokens(8, [0.02, 0.02, 0.03], num_at_once=5)
    histogram = meter.stats.inter_token_latency_s
    assert (histogram.count, histogram.sum) == (8, pytest.approx(0.07))
    assert histogram.quantile(5 / 8) == histogram.bounds[0]


def test_stats_survive_the_merging_of_deltas() -> None:
    first, later = RequestStats(queue_time_s=1), RequestStats(queue_time_s=1, latency_s=2)
    start, middle, end = Delta(token_ids=[1], stats=first), Delta(index=1, token_ids=[2]), Delta(index=2, stats=later)
    assert start.followed_by(middle).stats == first
    assert start.followed_by(middle).followed_by(end).stats == later


def test_our_metrics_fill_the_buckets_of_vllms_boards() -> None:
    """A query of one bucket (le="0.5") finds it, and it distinguishes a small model's few milliseconds."""
    vllms = {
        "time_to_first_token_s": "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 "
        "640 2560",
        "inter_token_latency_s": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80",
        "latency_s": "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
        "num_prompt_tokens_of": "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000 200000 500000",
        "num_step_tokens": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    }
    stats = EngineStats()
    for name, bounds in vllms.items():
        ours = getattr(stats, name).bounds
        assert set(map(float, bounds.split())) <= set(ours), name
        assert list(ours) == sorted(set(ours)), name
    stats.time_to_first_token_s.observe(0.0027)
    assert stats.time_to_first_token_s.quantile(0.5) == 0.003


def test_histograms_of_two_versions_add_up() -> None:
    old, new = Histogram.empty((0.01, 0.1)), Histogram.empty((0.005, 0.01, 0.1))
    for histogram, value in ((old, 0.003), (new, 0.003), (new, 0.05), (old, 7.0)):
        histogram.observe(value)
    both = old.merged(new)
    assert (both.bounds, both.counts) == ((0.005, 0.01, 0.1), [1, 1, 1, 1])
    assert both.sum == pytest.approx(7.056)
    assert both.merged(Histogram()).counts == both.counts
