"""The time for which output waits for a Redis that is short of time."""

from __future__ import annotations

import asyncio
import itertools
from typing import cast

import pytest
from redis.exceptions import ResponseError

from penstock.shared.connection import CommandConnection
from penstock.shared.keys import Keys
from penstock.worker.serving.redis_waiting import FIRST_PAUSE_S, MAX_PAUSE_S, RedisPressure, cpu_seconds

from ...processes import DEADLINE_S


class Readings:
    """A Redis that uses so much of its core, read every two seconds."""

    def __init__(self) -> None:
        self.pressure = RedisPressure(cast(CommandConnection, None), Keys().model("m"))
        self._cpu_s = self._at_s = 100.0
        self.pressure.record_cpu(self._cpu_s, self._at_s)

    def after(self, *shares: float) -> float:
        for share in shares:
            self._cpu_s, self._at_s = self._cpu_s + 2 * share, self._at_s + 2
            self.pressure.record_cpu(self._cpu_s, self._at_s)
        return self.pressure.pause_s

    def restart(self) -> None:
        self._cpu_s = 0.0
        self.pressure.record_cpu(self._cpu_s, self._at_s + 2)


def test_nothing_waits_while_redis_has_time_to_spare() -> None:
    assert Readings().after(0.1, 0.7, 0.4) == 0.0


def test_each_idle_check_lengthens_the_pause_up_to_a_limit() -> None:
    readings = Readings()
    assert readings.after(0.9) == FIRST_PAUSE_S
    assert readings.after(0.9) == 2 * FIRST_PAUSE_S
    assert readings.after(*[1.0] * 20) == MAX_PAUSE_S


def test_between_the_marks_it_stays_and_below_it_goes_back_to_nothing() -> None:
    readings = Readings()
    assert readings.after(0.9, 0.9, 0.9, 0.6, 0.7) == 4 * FIRST_PAUSE_S
    assert readings.after(0.3) == 2 * FIRST_PAUSE_S
    assert readings.after(0.3, 0.3) == 0.0


def test_a_restarted_server_gives_no_reading() -> None:
    readings = Readings()
    readings.after(0.9)
    readings.restart()
    assert readings.pressure.pause_s == FIRST_PAUSE_S


async def test_an_idle_writer_stops_polling_when_no_pause_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.worker.serving.redis_waiting.CHECK_EVERY_S", 0.0)
    checks: asyncio.Queue[float | None] = asyncio.Queue()
    at_s = itertools.count(100.0)

    class Recording(RedisPressure):
        """Pressure of an idle Redis, checked once per second."""

        async def check(self) -> None:
            checks.put_nowait(None if self._last is None else self.pause_s)
            self.record_cpu(0.0, next(at_s))

    async def until_check_is_over() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    pressure = Recording(cast(CommandConnection, None), Keys().model("m"))
    pressure.record_cpu(0.0, next(at_s))
    pressure.pause_s = 4 * FIRST_PAUSE_S
    running = asyncio.create_task(pressure.run())
    async with asyncio.timeout(DEADLINE_S):
        assert [await checks.get() for _ in range(3)] == [4 * FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, FIRST_PAUSE_S]
        await until_check_is_over()
        assert checks.empty()
        assert pressure.output_pause_s() == 0.0
        assert await checks.get() is None  # the first: the quiet time before it says nothing
        await until_check_is_over()
        assert checks.empty()
    running.cancel()


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
def test_the_command_thread_counts_where_it_is_reported(info: str, expected: float) -> None:
    assert cpu_seconds(info) == expected


def test_a_reply_without_times_is_an_error() -> None:
    with pytest.raises(ResponseError, match="used_cpu"):
        cpu_seconds("# CPU\r\n")
