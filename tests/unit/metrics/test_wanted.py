"""The signal for autoscalers, through curves of load with a model of KEDA behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.ops.lab.autoscaling_curves import BURST, DAY, HOUR_S, KV_TOKENS, NOISE, STEADY, draw


def test_a_steady_load_settles_and_nothing_starves() -> None:
    run = STEADY.run()
    assert run.num_turns() <= 1
    # The work of 2.5 engines, filled to four fifths, wants 3.1; a difference within a tenth is left alone.
    assert set(run.replicas[-1200:]) == {3}
    assert run.arrived - run.served <= 2.5 * KV_TOKENS  # running requests, and no waiting ones


def test_a_burst_is_served_and_all_engines_leave_after_it() -> None:
    run = BURST.run()
    assert run.replicas[:600] == [0] * 600
    assert max(run.replicas) >= 5
    assert run.arrived - run.served < 1  # the last token takes for ever in a fluid
    assert run.num_turns() == 1
    assert run.replicas[-1] == 0


def test_a_day_is_followed() -> None:
    """From nothing at night to five engines' load at noon."""
    run = DAY.run()
    assert run.replicas[0] == run.replicas[-1] == 0
    assert 5 <= max(run.replicas) <= 7
    assert run.arrived - run.served < 1
    assert run.num_turns() <= 6
    assert run.longest_wait_s < 120


def test_noise_around_a_boundary_does_not_swing() -> None:
    run = NOISE.run()
    steady = run.replicas[HOUR_S:]
    assert max(steady) - min(steady) <= 1
    assert run.num_turns() <= 8


def test_the_guide_has_a_picture_of_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
