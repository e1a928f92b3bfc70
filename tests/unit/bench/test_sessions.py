"""Figures that the row about sessions takes from its turns."""

from __future__ import annotations

import msgspec
import pytest

from penstock.ops.lab.bench.engines.report import sessions_table
from penstock.ops.lab.bench.engines.sessions import SessionsLoad, SessionsRow, SessionsSide, _side, _Turn
from penstock.ops.lab.bench.goals import sessions_goals
from penstock.shared.messages.outcome import Usage


def turn(tenant: str, number: int, cached: int, ended_s: float, num_findable: int = 100) -> _Turn:
    return _Turn(tenant, number, Usage(90, 10, cached), 5.0, ended_s, num_findable)


def test_the_first_turn_has_nothing_to_find() -> None:
    turns = [turn("a", 0, 0, 1.0, 0), turn("a", 1, 80, 2.0), turn("b", 0, 0, 1.0, 0), turn("b", 1, 40, 2.0)]
    assert _side(turns, 2.0).hit_share == pytest.approx(0.6)


def test_fairness_compares_tokens_until_the_first_tenant_ends() -> None:
    fair = [turn(tenant, number, 0, number + 1) for tenant in "ab" for number in range(2)]
    assert _side(fair, 2.0).jain == pytest.approx(1.0)
    late = [turn("b", number, 0, 3 * (number + 1)) for number in range(2)]
    assert _side([*fair[:2], *late], 6.0).jain == pytest.approx(0.5)  # all to one of two


def side(hit_share: float, jain: float) -> SessionsSide:
    return SessionsSide(hit_share=hit_share, ttft_p50_ms=1.0, ttft_p99_ms=2.0, jain=jain, wall_s=1.0)


def test_goals_are_hits_with_free_cache_and_fairness_without() -> None:
    room = SessionsLoad(
        name="room",
        num_sessions=6,
        plain=side(0.5, 1.0),
        warm=side(0.95, 0.5),
        ttft_p50_ratio=0.5,
        ttft_p99_ratio=0.5,
        kept_share=1.0,
    )
    full = msgspec.structs.replace(room, name="full", num_sessions=24, warm=side(0.6, 0.9))
    row = SessionsRow(model="tiny", num_engines=2, num_turns=8, max_num_seqs=8, rounds=1, loads=[room, full])
    assert [(goal.value, goal.state) for goal in sessions_goals(row)] == [(0.95, "met"), (0.9, "not met")]
    assert sessions_table(row).row_count == 2
