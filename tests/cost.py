"""The cost of tests: processor seconds of a test and of every process that it starts, by file and by test.

    make test-cost TESTS=tests/faults

Wall time depends on the machine and its other load; this is mostly the same on a busy one. A run's processes are
known by a variable of the environment that it was started with, so programs count that are forked from one with all its
imports done, as they are in `make test`, and engines of the fork server. They cost whichever test runs at that moment:
files that share a stack are measured with its start, once for each run.
"""

from __future__ import annotations

import gc
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from .forked_lanes import FORKED_VARIABLE, import_tests
from .program_server import serve_programs

_VARIABLE = "PENSTOCK_TEST_COST"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Tests below this are listed by their file alone.
_TOLD_FROM_S = 2.0

# A forked process shows the environment that the first of them was started with.
_MARK = os.environ[_VARIABLE]


class Meter:
    """Meter of the computing time of this run's processes: those that live, and the children that they have reaped."""

    def __init__(self) -> None:
        self._known = {os.getpid()}

    def read_s(self) -> float:
        """Return the seconds so far, without those of orphans that have ended."""
        pids = {int(entry) for entry in os.listdir("/proc") if entry.isdecimal()}
        self._known &= pids
        ticks = 0
        for pid in sorted(pids):
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it is among the children of its parent now
            if self._belongs(pid, int(fields[1])):
                ticks += sum(map(int, fields[11:15]))
        return ticks / _TICKS_PER_S

    def _belongs(self, pid: int, parent: int) -> bool:
        # Asked again until it is: a child that has not become its program yet has its parent's variables. redis-server
        # has none that can be seen, since it writes its title over them.
        if pid not in self._known:
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                return False
            if parent not in self._known and f"{_VARIABLE}={_MARK}".encode() not in environment:
                return False
            self._known.add(pid)
        return True


class _Cost:
    def __init__(self) -> None:
        self.cpu_s = self.wall_s = 0.0
        self.num_tests = 0


_METER = Meter()
_BY_FILE: dict[str, _Cost] = defaultdict(_Cost)
_BY_TEST: dict[str, float] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Programs and engines start as they do in lanes (``forked_lanes.py``)."""
    serve_programs(config)
    import_tests(config)
    gc.freeze()
    os.environ[FORKED_VARIABLE] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before_s, start_s = _METER.read_s(), time.monotonic()
    try:
        return (yield)
    finally:
        cost, cpu_s = _BY_FILE[item.location[0]], _METER.read_s() - before_s
        cost.cpu_s += cpu_s
        cost.wall_s += time.monotonic() - start_s
        cost.num_tests += 1
        if cpu_s >= _TOLD_FROM_S:
            _BY_TEST[item.nodeid] = cpu_s


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    write = terminalreporter.write_line
    terminalreporter.section("CPU seconds")
    write(f"{_METER.read_s():8.1f} in all, {sum(cost.cpu_s for cost in _BY_FILE.values()):.1f} of them in tests")
    write("     cpu     wall   tests")
    for path, cost in sorted(_BY_FILE.items(), key=lambda entry: -entry[1].cpu_s):
        write(f"{cost.cpu_s:8.1f} {cost.wall_s:8.1f} {cost.num_tests:7}  {path}")
    for test, cpu_s in sorted(_BY_TEST.items(), key=lambda entry: -entry[1]):
        write(f"{cpu_s:8.1f}  {test}")
