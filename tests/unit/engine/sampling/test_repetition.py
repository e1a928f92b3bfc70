"""Repetition in an output, against the definition, and the first of several reasons to end a request."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.outcome import FinishReason
from penstock.shared.params.sampling import RepetitionDetectionParams, SamplingParams
from penstock.worker.engine.scheduling.block_pool import BlockPool
from penstock.worker.engine.scheduling.request import Request, RequestStatus
from penstock.worker.engine.scheduling.scheduler import Scheduler
from penstock.worker.engine.scheduling.scheduler_output import SampledTokens
from penstock.worker.engine.scheduling.stop import check_stop, ends_in_repetition

REPETITION = (FinishReason.REPETITION, "repetition_detected")


def by_definition(output: list[int], smallest: int, largest: int, count: int) -> bool:
    sizes = range(smallest, min(largest, len(output) // count) + 1)
    return any(output[-size * count :] == output[-size:] * count for size in sizes)


@pytest.mark.slow
@settings(max_examples=500)
@given(
    st.lists(st.integers(0, 1), max_size=5),
    st.lists(st.integers(0, 2), max_size=24),
    st.integers(1, 6),
    st.integers(0, 6),
    st.integers(2, 5),
)
def test_repetition_is_detected_exactly_by_its_definition(
    prompt: list[int], output: list[int], largest: int, smallest: int, count: int
) -> None:
    params = RepetitionDetectionParams(
        max_pattern_size=largest, min_pattern_size=min(smallest, largest), min_count=count
    )
    expected = by_definition(output, max(params.min_pattern_size, 1), largest, count)
    assert ends_in_repetition(prompt + output, len(prompt), params) == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(2, 6), st.integers(0, 2))
def test_a_repeated_pattern_is_detected(pattern: list[int], count: int, num_before: int) -> None:
    params = RepetitionDetectionParams(max_pattern_size=5, min_count=count)
    assert ends_in_repetition([9] * num_before + pattern * count, 0, params)


@pytest.mark.parametrize(
    ("detection", "output", "expected"),
    [
        # vLLM's own examples.
        ((3, 2, 3), [1, 2, 3, 1, 2, 3, 1, 2, 3], REPETITION),
        ((3, 2, 3), [1, 2, 3, 1, 2, 3], None),
        ((5, 2, 4), [1, 2, 1, 2, 1, 2, 1, 2], REPETITION),
        ((3, 2, 3), [1, 2, 3, 1, 2, 3, 1, 2, 4], None),
        ((3, 2, 3), [1, 2, 3, 4, 5, 6, 5, 6, 5, 6], REPETITION),
        ((10, 2, 3), [1, 2, 3, 4, 5, 6, 7, 8] * 5, REPETITION),
        ((5, 3, 3), [10, 20, 10, 20, 10, 20], None),
        ((0, 0, 0), [1, 1, 1, 1, 1, 1], None),
        ((1, 1, 2), [], None),
    ],
)
def test_a_request_that_repeats_itself_ends(
    detection: tuple[int, int, int], output: list[int], expected: object
) -> None:
    stop = check_stop(make_request(output, detection))
    assert (stop and stop[:2]) == expected


@pytest.mark.parametrize(
    ("params", "output", "expected"),
    [
        ({"min_tokens": 7}, [5] * 6, None),
        ({"min_tokens": 6}, [5] * 6, REPETITION),
        ({"max_tokens": 6}, [5] * 6, (FinishReason.LENGTH, None)),
        ({"stop_token_ids": [5]}, [5] * 6, (FinishReason.STOP, 5)),
    ],
)
def test_other_ends_go_before_it(params: dict[str, Any], output: list[int], expected: object) -> None:
    stop = check_stop(make_request(output, (2, 1, 3), **params))
    assert (stop and stop[:2]) == expected


def make_request(output: list[int], detection: tuple[int, int, int], **params: Any) -> Request:
    largest, smallest, count = detection
    options = {
        "max_tokens": None,
        "repetition_detection": RepetitionDetectionParams(
            max_pattern_size=largest, min_pattern_size=smallest, min_count=count
        ),
        **params,
    }
    return Request("r", [5, 5, 5, 5], SamplingParams(**options), max_model_len=60, output_token_ids=output)


def test_the_scheduler_ends_a_repetition_with_its_reason() -> None:
    """Tokens of a former engine count."""
    scheduler = Scheduler(BlockPool(8, 16), max_num_seqs=2, max_num_batched_tokens=32, max_model_len=60)
    request = make_request([7, 7], (1, 1, 3))
    scheduler.add_request(request)
    (output,) = scheduler.update_from_output(scheduler.schedule(), SampledTokens([[7]]))
    assert output == EngineCoreOutput("r", [7], *REPETITION)
    assert request.status is RequestStatus.FINISHED_REPETITION
    assert not scheduler.has_unfinished_requests
