"""Which requests are waited for after an engine was killed."""

from __future__ import annotations

import pytest

from penstock.ops.lab.chaos import recovery_clock
from penstock.ops.lab.chaos.recovery_clock import RecoveryClock


def test_a_request_that_ends_with_a_delta_in_flight_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_clock, "IN_FLIGHT_S", float("inf"))
    clock = RecoveryClock()
    clock.died(["a", "b"])
    clock.saw("a")
    assert clock.num_waiting == 2
    clock.ended("a")
    assert clock.num_waiting == 1
    monkeypatch.setattr(recovery_clock, "IN_FLIGHT_S", -1.0)
    clock.saw("b")
    assert (clock.num_waiting, len(clock.recoveries_s)) == (0, 1)
