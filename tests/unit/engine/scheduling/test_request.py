"""Status transitions, stop rules and resumption of a request."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.messages.outcome import FinishReason
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.scheduling.block_pool import InvariantError
from penstock.worker.engine.scheduling.request import Request, RequestStatus
from penstock.worker.engine.scheduling.stop import check_stop

EOS = frozenset({2, 3})


def make_request(output: list[int], **params: Any) -> Request:
    """A request with a prompt of 4 tokens and these output tokens, for a model of 100."""
    return Request(
        "r",
        [9, 9, 9, 9],
        SamplingParams(**params),
        max_model_len=100,
        eos_token_ids=EOS,
        output_token_ids=output,
    )


@pytest.mark.parametrize(
    ("params", "output", "expected"),
    [
        ({}, [7, 2], (FinishReason.STOP, None)),
        ({}, [7, 3], (FinishReason.STOP, None)),
        ({}, [2, 7], None),
        ({"stop_token_ids": [7]}, [7], (FinishReason.STOP, 7)),
        ({"stop_token_ids": [2]}, [2], (FinishReason.STOP, None)),
        ({"stop_token_ids": [2], "ignore_eos": True}, [2], (FinishReason.STOP, 2)),
        ({"ignore_eos": True}, [2], None),
        ({"max_tokens": 2}, [7, 7], (FinishReason.LENGTH, None)),
        ({"max_tokens": 2}, [7, 2], (FinishReason.STOP, None)),
        ({"min_tokens": 3}, [7, 2], None),
        ({"min_tokens": 3}, [7, 7, 2], (FinishReason.STOP, None)),
        ({"max_tokens": None}, [7] * 95, None),
        ({"max_tokens": None}, [7] * 96, (FinishReason.LENGTH, None)),
        ({"max_tokens": 500, "min_tokens": 500}, [7] * 96, (FinishReason.LENGTH, None)),
        ({}, [], None),
    ],
)
def test_check_stop(params: dict[str, Any], output: list[int], expected: object) -> None:
    stop = check_stop(make_request(output, **params))
    assert (stop and stop[:2]) == expected


def test_delivered_tokens_count_as_output_and_are_not_computed() -> None:
    request = make_request([5, 6])
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_uncomputed_tokens) == (4, 2, 6)


def test_a_request_without_a_seed_keeps_the_one_drawn_for_it() -> None:
    assert make_request([]).seed == make_request([5]).seed
    assert make_request([], seed=11).seed == 11


@pytest.mark.parametrize(
    "path",
    [
        [RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.RUNNING, RequestStatus.FINISHED_STOPPED],
        [RequestStatus.FINISHED_ABORTED],
        [RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.FINISHED_ABORTED],
    ],
)
def test_legal_paths(path: list[RequestStatus]) -> None:
    request = make_request([])
    for status in path:
        request.move_to(status)
    assert request.is_finished


@pytest.mark.parametrize(
    "path",
    [
        [RequestStatus.PREEMPTED],
        [RequestStatus.RUNNING, RequestStatus.WAITING],
        [RequestStatus.FINISHED_ERROR, RequestStatus.RUNNING],
        [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_STOPPED],
    ],
)
def test_an_illegal_step_raises(path: list[RequestStatus]) -> None:
    request = make_request([])
    *legal, illegal = path
    for status in legal:
        request.move_to(status)
    with pytest.raises(InvariantError):
        request.move_to(illegal)
