"""Every test is given out once, whatever the order, and files of one group together."""

from __future__ import annotations

import pytest

from ...lanes import LONGEST, TESTS, arrange, in_turns, place


def test_tests_that_run_first_exist() -> None:
    assert [name for name in LONGEST if not (TESTS / name).is_file()] == []


def test_nothing_is_lost_and_a_group_stays_together(request: pytest.FixtureRequest) -> None:
    items = list(request.session.items)
    arranged = list(items)
    markers = [list(item.own_markers) for item in items]
    try:
        arrange(arranged)
        groups = [mark.args[0] for item in arranged if (mark := item.get_closest_marker("xdist_group"))]
    finally:
        for item, own in zip(items, markers, strict=True):
            item.own_markers[:] = own
    assert sorted(map(id, arranged)) == sorted(map(id, items))
    assert len(groups) == len(items)
    changes = [name for number, name in enumerate(groups) if not number or groups[number - 1] != name]
    assert len(changes) == len(set(changes))


def test_computing_tests_are_spread_among_waiting_ones() -> None:
    files = ["faults/test_chaos.py", "unit/a.py", *[f"kernels/{n}.py" for n in "ab"], *[f"e2e/{n}.py" for n in "abcd"]]
    assert in_turns({name: place(TESTS / name) for name in files}) == [
        "faults/test_chaos.py",
        "e2e/a.py",
        "kernels/a.py",
        "e2e/b.py",
        "e2e/c.py",
        "kernels/b.py",
        "e2e/d.py",
        "unit/a.py",
    ]
