"""How long output waits for a Redis that is short of time."""

from __future__ import annotations

from typing import cast

import pytest
from redis.exceptions import ResponseError

from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys
from penstock.worker.serving.redis_pressure import FIRST_PAUSE_S, MAX_PAUSE_S, RedisPressure, cpu_seconds


class Readings:
    """A Redis that uses so much of its core, read every two seconds."""

    def __init__(self) -> None:
        self.pressure = RedisPressure(cast(CommandConnection, None), Keys().model("m"))
        self._cpu_s = self._at_s = 100.0
        self.pressure.note(self._cpu_s, self._at_s)

    def after(self, *shares: float) -> float:
        for share in shares:
            self._cpu_s, self._at_s = self._cpu_s + 2 * share, self._at_s + 2
            self.pressure.note(self._cpu_s, self._at_s)
        return self.pressure.pause_s

    def restart(self) -> None:
        self._cpu_s = 0.0
        self.pressure.note(self._cpu_s, self._at_s + 2)


def test_nothing_waits_while_redis_has_time_to_spare() -> None:
    assert Readings().after(0.1, 0.7, 0.4) == 0.0


def test_output_waits_longer_at_each_look_at_which_it_has_none_up_to_a_bound() -> None:
    readings = Readings()
    assert readings.after(0.9) == FIRST_PAUSE_S
    assert readings.after(0.9) == 2 * FIRST_PAUSE_S
    assert readings.after(*[1.0] * 20) == MAX_PAUSE_S


def test_between_the_marks_it_stays_and_below_it_goes_back_to_nothing() -> None:
    readings = Readings()
    assert readings.after(0.9, 0.9, 0.9, 0.6, 0.7) == 4 * FIRST_PAUSE_S
    assert readings.after(0.3) == 2 * FIRST_PAUSE_S
    assert readings.after(0.3, 0.3) == 0.0


def test_a_server_that_was_started_anew_says_nothing() -> None:
    readings = Readings()
    readings.after(0.9)
    readings.restart()
    assert readings.pressure.pause_s == FIRST_PAUSE_S


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ("# CPU\r\nused_cpu_sys:5.0\r\nused_cpu_user:7.0\r\nused_cpu_sys_children:9.0\r\n", 12.0),
        (
            "used_cpu_sys:5.0\r\nused_cpu_user:7.0\r\nused_cpu_sys_main_thread:1.5\r\nused_cpu_user_main_thread:2.0\r\n",
            3.5,
        ),
    ],
)
def test_the_thread_that_runs_commands_counts_where_it_is_told(info: str, expected: float) -> None:
    assert cpu_seconds(info) == expected


def test_what_tells_no_times_is_an_error() -> None:
    with pytest.raises(ResponseError, match="used_cpu"):
        cpu_seconds("# CPU\r\n")
