"""What counts as harm, and what as a run that shows nothing."""

from __future__ import annotations

import pytest

from penstock.ops.chaos.load import Sighting
from penstock.ops.chaos.verdict import judge
from penstock.ops.chaos.workload import ChaosRequest
from penstock.producer import SamplingParams

REQUEST = ChaosRequest("hi", SamplingParams(max_tokens=3), is_detached=False)


def sighting(tokens: list[int], *ends: str, is_gone: bool = False, error: str = "") -> Sighting:
    indexes = list(range(len(tokens)))
    return Sighting(REQUEST, "r", indexes, tokens, "".join(map(chr, tokens)), list(ends), error, is_gone)


WHOLE = sighting([65, 66, 67], "length")
CUT = sighting([65, 66])


def test_a_run_in_which_nothing_was_killed_is_not_clean() -> None:
    assert judge([WHOLE], [WHOLE], num_kills=1).is_clean
    assert not judge([WHOLE], [WHOLE], num_kills=0).is_clean


def test_what_redis_lost_is_harm_unless_it_was_made_to_lose_it() -> None:
    gone = sighting([65, 66], is_gone=True)
    assert judge([WHOLE], [gone], num_kills=1).lost == 1
    excused = judge([WHOLE], [WHOLE, gone], num_kills=1, loses_data=True)
    assert (excused.is_clean, excused.num_gone) == (True, 1)
    # What it saw must be right all the same, and a stream without an end is never excused.
    assert judge([WHOLE], [sighting([65, 67], is_gone=True)], num_kills=1, loses_data=True).different == 1
    assert judge([WHOLE], [CUT], num_kills=1, loses_data=True).lost == 1
    # If all is gone, nothing was shown.
    assert not judge([WHOLE], [gone], num_kills=1, loses_data=True).is_clean


@pytest.mark.parametrize(
    ("seen", "harm"),
    [
        (CUT, "lost"),
        (sighting([65, 66, 68], "length"), "different"),
        (sighting([65, 66, 67], "length", "length"), "wrong_ends"),
        (sighting([65], error="engine_dead: …"), "failed"),
    ],
)
def test_harms(seen: Sighting, harm: str) -> None:
    verdict = judge([WHOLE], [seen], num_kills=1)
    assert getattr(verdict, harm) == 1
    assert not verdict.is_clean
