"""Links between the attempts of one request."""

from __future__ import annotations

from penstock.shared.queue.lifecycle import EventKind, RequestEvent
from penstock.worker.serving.reporting.attempt_spans import AttemptIds, before_claim, span_id_of, trace_id_of


def event(at: float, kind: EventKind, epoch: int = 0) -> RequestEvent:
    return RequestEvent(event_id=f"{int(at)}-0", at=at, request_id="r", tenant="t", band="b", kind=kind, epoch=epoch)


QUEUED, FIRST = event(1, EventKind.QUEUED), event(3, EventKind.CLAIMED, 10)
DIED, SECOND = event(5, EventKind.RECLAIMED), event(8, EventKind.CLAIMED, 20)
BACK, THIRD = event(9, EventKind.HANDED_BACK), event(12, EventKind.CLAIMED, 30)
WAITED, WENT_ON = event(13, EventKind.AWAITING_INPUT), event(14, EventKind.CONTINUED)
FOURTH = event(15, EventKind.CLAIMED, 40)
ALL = [QUEUED, FIRST, DIED, SECOND, BACK, THIRD, WAITED, WENT_ON, FOURTH]


def test_a_claim_links_to_the_event_that_requeued_the_request() -> None:
    assert before_claim(ALL, 10) == (None, QUEUED, FIRST)
    assert before_claim(ALL, 20) == (FIRST, DIED, SECOND)
    assert before_claim(ALL, 30) == (SECOND, BACK, THIRD)
    assert before_claim(ALL, 40) == (THIRD, WENT_ON, FOURTH)


def test_nothing_follows_from_events_that_are_not_kept() -> None:
    assert before_claim([], 10) is None
    assert before_claim([QUEUED, FIRST], 11) is None
    assert before_claim([FOURTH], 40) is None


def test_ids_follow_from_trace_request_and_epoch() -> None:
    trace_id = trace_id_of("m", "r")
    assert trace_id == trace_id_of("m", "r") != trace_id_of("m", "s")
    others = ((trace_id, "r", 1), (trace_id, "r", 2), (trace_id, "s", 1), (1, "r", 1))
    ids = {span_id_of(*one) for one in others}
    assert len(ids) == 4
    assert all(0 < one < 2**64 for one in ids)


def test_chosen_ids_are_those_of_the_next_span_alone() -> None:
    ids = AttemptIds()
    ids.choose(trace_id=5, span_id=7)
    assert (ids.generate_trace_id(), ids.generate_span_id()) == (5, 7)
    assert ids.generate_span_id() != 7
    ids.choose(trace_id=6)
    assert ids.generate_trace_id() == 6
    assert ids.generate_span_id() not in (0, 7)
