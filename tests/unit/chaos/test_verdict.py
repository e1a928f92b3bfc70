"""Verdicts: a harm, and a run that shows nothing."""

from __future__ import annotations

import pytest

from penstock.ops.lab.chaos.ledger_records import LedgerCheck
from penstock.ops.lab.chaos.load import Sighting
from penstock.ops.lab.chaos.owners import Owners
from penstock.ops.lab.chaos.verdict import judge
from penstock.ops.lab.chaos.workload import ChaosRequest
from penstock.producer import SamplingParams
from penstock.shared.broker.ledger import LedgerSums
from penstock.shared.queue.lifecycle import EventKind, RequestEvent

REQUEST = ChaosRequest("hi", SamplingParams(max_tokens=3), is_detached=False)


def sighting(tokens: list[int], *ends: str, is_gone: bool = False, error: str = "") -> Sighting:
    indexes = list(range(len(tokens)))
    return Sighting(REQUEST, "r", indexes, tokens, "".join(map(chr, tokens)), list(ends), error, is_gone)


OWNERS = Owners(num_records=1)
WHOLE = sighting([65, 66, 67], "length")
CUT = sighting([65, 66])


def test_a_run_in_which_nothing_was_killed_is_not_clean() -> None:
    assert judge([WHOLE], [WHOLE], OWNERS, num_kills=1).is_clean
    nothing = judge([WHOLE], [WHOLE], OWNERS, num_kills=0)
    assert (nothing.is_clean, nothing.shows_nothing) == (False, "nothing was killed")


def test_resampled_requests_are_checked_for_all_but_their_tokens() -> None:
    other, repeated = sighting([65, 66, 68], "length"), sighting([65, 66, 68], "length")
    repeated.indexes[2] = 1
    assert judge([WHOLE], [other], OWNERS, num_kills=1).different == 1
    verdict = judge([WHOLE, WHOLE], [other, WHOLE], OWNERS, num_kills=1, may_differ=[True, False])
    assert (verdict.is_clean, verdict.num_compared) == (True, 1)
    assert judge([WHOLE], [repeated], OWNERS, num_kills=1, may_differ=[True]).duplicated == 1
    assert judge([WHOLE], [CUT], OWNERS, num_kills=1, may_differ=[True]).lost == 1


def test_a_run_without_the_requested_faults_is_not_passed() -> None:
    verdict = judge([WHOLE], [WHOLE], OWNERS, num_kills=3, missing=["kill primary"])
    assert (verdict.is_clean, verdict.shows_nothing) == (False, "this never happened: kill primary")


def test_an_unobserved_run_is_not_passed() -> None:
    assert not judge([WHOLE], [WHOLE], Owners(), num_kills=3).is_clean


def test_two_owners_fail_the_run_even_with_right_output() -> None:
    owners = Owners()
    owners.claimed("r", 2, "B")
    owners.wrote("r", 1, 0, 1)
    verdict = judge([WHOLE], [WHOLE], owners, num_kills=1)
    assert (verdict.is_clean, verdict.two_owners, verdict.examples) == (False, 1, owners.harms)


def test_a_ledger_that_differs_from_the_records_fails_the_run() -> None:
    sums = LedgerSums(prompt=1)
    check = LedgerCheck(
        num_requests=1, num_live=0, num_accounts=1, ledger=sums, records=LedgerSums(), differences=["prompt is 1"]
    )
    verdict = judge([WHOLE], [WHOLE], OWNERS, num_kills=1, ledger=check)
    assert (verdict.is_clean, verdict.wrong_ledger, verdict.examples) == (False, 1, ["prompt is 1"])


def test_data_loss_fails_the_run_unless_it_was_injected() -> None:
    absent = sighting([65, 66], is_gone=True)
    assert judge([WHOLE], [absent], OWNERS, num_kills=1).lost == 1
    excused = judge([WHOLE], [WHOLE, absent], OWNERS, num_kills=1, loses_data=True)
    assert (excused.is_clean, excused.num_gone) == (True, 1)
    # Its tokens must be right all the same, and a stream without an end is never excused.
    assert judge([WHOLE], [sighting([65, 67], is_gone=True)], OWNERS, num_kills=1, loses_data=True).different == 1
    assert judge([WHOLE], [CUT], OWNERS, num_kills=1, loses_data=True).lost == 1
    # If all is gone, nothing was shown.
    assert not judge([WHOLE], [absent], OWNERS, num_kills=1, loses_data=True).is_clean


@pytest.mark.parametrize(
    ("observed", "harm"),
    [
        (CUT, "lost"),
        (sighting([65, 66, 68], "length"), "different"),
        (sighting([65, 66, 67], "length", "length"), "wrong_ends"),
        (sighting([65], error="engine_dead: …"), "failed"),
    ],
)
def test_harms(observed: Sighting, harm: str) -> None:
    verdict = judge([WHOLE], [observed], OWNERS, num_kills=1)
    assert getattr(verdict, harm) == 1
    assert not verdict.is_clean


def event(kind: str, number: int = 0) -> RequestEvent:
    return RequestEvent(
        event_id="1-0", at=1.0, request_id="r", tenant="t", band="b", kind=EventKind(kind), num_output_tokens=number
    )


@pytest.mark.parametrize(
    ("events", "num_judged", "is_wrong"),
    [
        ([event("queued"), event("claimed"), event("reclaimed"), event("claimed"), event("finished", 3)], 1, 0),
        ([event("queued"), event("claimed"), event("finished", 3), event("finished", 3)], 1, 1),
        ([event("queued"), event("claimed")], 1, 1),
        ([event("queued"), event("finished", 3)], 1, 1),
        ([event("queued"), event("claimed"), event("finished", 1)], 1, 1),
        ([event("queued"), event("claimed"), event("cancelled", 3)], 1, 1),
        # The first of its events are kept no more.
        ([event("claimed"), event("finished", 3)], 0, 0),
        ([], 0, 0),
    ],
)
def test_events_that_do_not_fit_are_harm(events: list[RequestEvent], num_judged: int, is_wrong: int) -> None:
    verdict = judge([WHOLE], [WHOLE], OWNERS, num_kills=1, timelines={WHOLE.request_id: events})
    assert (verdict.num_timelines, verdict.wrong_timelines, verdict.is_clean) == (num_judged, is_wrong, not is_wrong)
