"""Lanes forked from the process that distributes the tests, once that has imported their modules.

A lane spends most time before its first test on imports: torch, transformers, our own sources, and the modules
of tests, whose asserts are rewritten. The controller imports all of it once and forks as many children as there are
lanes, which share that memory. Each does what a lane that was started does: it configures pytest and collects, and
finds the modules there.

A fork takes no thread along. Where one runs during the imports, lanes are started as ever; so is one that takes the
place of a lane that died.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from _pytest.config import apply_warning_filters
from _pytest.pathlib import ImportMode, import_path
from execnet import gateway_io
from execnet.gateway_base import Popen2IO
from hypothesis import given, settings
from hypothesis.strategies import integers

from penstock.worker.processes.forking import be_child

from .fast import NEED_TORCH, is_among
from .forked_program import end_as_python_does, forget_exit_handlers
from .program_server import serve_programs

# Of a lane's environment, if it was forked.
FORKED_VARIABLE = "PENSTOCK_TEST_LANE_IS_FORKED"

# The file that brought torch along, though it is said to do without; None where they were not imported here, or torch
# was there before.
brought_torch: list[Path] | None = None


class ForkedLane:
    """A child of this process; it reads and writes through two pipes, as a started program does.

    Args:
        others: lanes so far, whose ends of pipes it must not hold: an end of a stream is seen when its last holder has
            let go of it.
        held: descriptors that it must not hold, for the same reason.
    """

    def __init__(self, others: Sequence[ForkedLane], descriptors: Sequence[int]) -> None:
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for lane in others:
                lane.stdin.close()
                lane.stdout.close()
            for descriptor in (ours_out, ours_in, *descriptors):
                os.close(descriptor)
            be_child(partial(_become_lane, theirs_in, theirs_out))
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdin, self.stdout = open(ours_out, "wb"), open(ours_in, "rb")  # noqa: SIM115  # execnet closes them

    def wait(self) -> int:
        """Wait as ``subprocess.Popen`` does."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def kill(self) -> None:
        """Kill as ``subprocess.Popen`` does."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)


def _become_lane(theirs_in: int, theirs_out: int) -> int:
    """Run the code that execnet writes to interpreters that it starts, in an equally empty module of this process."""
    for source, target in ((theirs_in, 0), (theirs_out, 1)):
        os.dup2(source, target)
        os.close(source)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # for as long as the process is there
    sys.stdout = open(1, "w", 1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, closefd=False)  # noqa: SIM115
    sys.argv = ["-c"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    os.environ[FORKED_VARIABLE] = "1"
    forget_exit_handlers()
    exec(eval(sys.stdin.readline()), main.__dict__)
    end_as_python_does()
    return 0


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Called before the first lane is started, and before execnet has threads."""
    descriptors = serve_programs(config)
    import_tests(config)
    _read_constants()
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1 or not all(spec.popen and not spec.python for spec in specs):
        config.get_terminal_writer().line(f"lanes are started, not forked: {num_threads} threads here, or other specs")
        return
    gc.collect()
    gc.freeze()
    # Else libraries that count their objects at the end report these as leaked.
    atexit.register(gc.unfreeze)
    sys.stdout.flush()
    sys.stderr.flush()
    lanes: list[ForkedLane] = []
    for _ in specs:
        lanes.append(ForkedLane(lanes, descriptors))

    class LaneIO(gateway_io.Popen2IOMaster):
        def __init__(self, args: Any, execmodel: Any) -> None:
            if lanes:
                self.popen = lanes.pop(0)
                Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)
            else:
                super().__init__(args, execmodel)

    gateway_io.Popen2IOMaster = LaneIO


def import_tests(config: pytest.Config) -> None:
    """Import modules of tests as a collection does, those that need torch last; lanes report a failure when they import
    the module again.
    """
    global brought_torch
    brought_torch = None if "torch" in sys.modules else []
    with warnings.catch_warnings():
        apply_warning_filters(config.getini("filterwarnings"), config.known_args_namespace.pythonwarnings or [])
        for path in sorted(_test_files(config), key=_needs_torch):
            has_torch = "torch" in sys.modules
            with suppress(Exception, pytest.skip.Exception):
                import_path(path, mode=ImportMode.importlib, root=config.rootpath, consider_namespace_packages=False)
            if "torch" in sys.modules and not has_torch and not _needs_torch(path):
                brought_torch = [path]


def _needs_torch(path: Path) -> bool:
    return is_among(path, NEED_TORCH)


@settings(max_examples=200, database=None)  # one in twenty looks at them, and ten had none
@given(integers())
def _read_constants(_: int) -> None:
    """hypothesis reads the numbers and words in our sources when they are first looked at; lanes find them there."""


def _test_files(config: pytest.Config) -> Iterator[Path]:
    for argument in config.args:
        path = config.invocation_params.dir / argument.partition("::")[0]
        for file in [path] if path.is_file() else sorted([*path.rglob("conftest.py"), *path.rglob("test_*.py")]):
            if not config.hook.pytest_ignore_collect(collection_path=file, config=config):
                yield file
