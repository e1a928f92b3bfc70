"""When a core that loads counts as hung; by a clock that the tests turn."""

from __future__ import annotations

import msgspec
import pytest

from penstock.worker.serving.core.stall import MIN_MOVED_BYTES, Activity, LoadWatch

TIMEOUT_S = 40.0


class Core:
    """The watched state of a core, and the time, both set by the test."""

    def __init__(self) -> None:
        self.now = 100.0
        self.seen: Activity | None = Activity(entered_ns=1, num_bytes=10, rss_bytes=10, pids=frozenset({7}))
        self.watch = LoadWatch(self._see, TIMEOUT_S, clock=lambda: self.now)
        self.watch.check(self.seen)

    async def _see(self) -> Activity | None:
        return self.seen

    def set(self, **fields: object) -> None:
        assert self.seen is not None
        self.seen = msgspec.structs.replace(self.seen, **fields)

    def pass_time(self, seconds: float, interval_s: float = 2.0) -> str | None:
        end = self.now + seconds
        while self.now < end:
            self.now += interval_s
            finding = self.watch.check(self.seen)
            if finding is not None:
                return finding
        return None


@pytest.fixture
def core() -> Core:
    return Core()


def test_a_core_that_stands_still_hangs(core: Core) -> None:
    assert core.pass_time(TIMEOUT_S - 2) is None
    assert core.pass_time(2) == (
        "the engine core hung while it loaded: for 40.0 s (--load-timeout) it read and wrote nothing, took no memory "
        "and reported no progress"
    )


@pytest.mark.parametrize(
    "step",
    [
        {"entered_ns": 1},
        {"num_bytes": MIN_MOVED_BYTES},
        {"rss_bytes": MIN_MOVED_BYTES},
    ],
)
def test_a_slow_core_that_advances_is_left_alone(core: Core, step: dict[str, int]) -> None:
    ((name, amount),) = step.items()
    for count in range(1, 30):
        core.set(**{name: 10 + count * amount})
        assert core.pass_time(TIMEOUT_S - 2) is None


def test_a_process_that_it_starts_is_progress_and_one_that_ends_is_not(core: Core) -> None:
    assert core.pass_time(TIMEOUT_S - 2) is None
    core.set(pids=frozenset({7, 8}))
    assert core.pass_time(TIMEOUT_S - 2) is None
    core.set(pids=frozenset({7}))
    assert core.pass_time(4)


def test_memory_that_goes_up_and_down_is_no_progress(core: Core) -> None:
    for _ in range(10):
        core.set(rss_bytes=20 * MIN_MOVED_BYTES)
        core.pass_time(2)
        core.set(rss_bytes=10)
        if core.pass_time(2):
            break
    assert core.now <= 100.0 + TIMEOUT_S + 4


def test_the_polling_of_a_library_is_no_progress(core: Core) -> None:
    findings = []
    for count in range(25):
        core.set(num_bytes=10 + 8 * count)
        findings.append(core.pass_time(2))
    assert any(findings)


def test_time_without_a_core_or_without_checks_does_not_count(core: Core) -> None:
    core.seen = None
    assert core.pass_time(10 * TIMEOUT_S) is None
    core.seen = Activity()
    core.now += 100 * TIMEOUT_S
    assert core.watch.check(core.seen) is None
    assert core.pass_time(TIMEOUT_S - 2) is None
