"""Setup and end of a forked program, as Python would do them (``program_server.py``)."""

from __future__ import annotations

import atexit
import fcntl
import gc
import logging
import multiprocessing.util
import os
import runpy
import signal
import sys
import threading
import traceback
import types
import warnings
from pathlib import Path

from penstock.ops.local import server as local_server
from penstock.ops.local import worker as local_worker

from .warm_python import WarmProgram

# Numbers of descriptors from here on are free.
_AWAY = 512


def become_program(
    executable: str, words: list[str], folder: str, environment: dict[str, str], descriptors: dict[int, int]
) -> int:
    """Run ``words`` in ``folder`` and return the exit status.

    Args:
        executable: the program's ``sys.executable``.
        descriptors: the descriptors handed over, by their numbers in the program.
    """
    os.setsid()
    # Moved away first: a descriptor's present number may be another's future one.
    away = {number: fcntl.fcntl(has, fcntl.F_DUPFD_CLOEXEC, _AWAY) for number, has in descriptors.items()}
    for number, source in away.items():
        os.dup2(source, number)
        os.close(source)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    _begin_anew(executable)
    return _status_of(words)


def _begin_anew(executable: str) -> None:
    """Undo the changes that the process of the tests has made to the interpreter."""
    import structlog

    sys.executable = executable
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # for as long as the process is there
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest")]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    structlog.reset_defaults()
    logging.getLogger().handlers.clear()
    # Those that Python begins with; in tests warnings are errors.
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    # Deployments that the program starts, as those of a test.
    local_worker.start_program = local_server.start_program = WarmProgram
    forget_exit_handlers()
    gc.enable()


def forget_exit_handlers() -> None:
    """Forget the exit handlers of the process from which this one was forked."""
    atexit._clear()
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def end_as_python_does() -> None:
    """Wait for threads and call exit handlers, as the interpreter does before it is taken down."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _status_of(words: list[str]) -> int:
    try:
        _run(words)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            status = ended.code or 0
        else:
            sys.stderr.write(f"{ended.code}\n")
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    else:
        status = 0
    end_as_python_does()
    return status & 0xFF


def _run(words: list[str]) -> None:
    """Run as ``python`` does with ``-m MODULE …`` and ``SCRIPT …``."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if words[0] == "-m":
        _, name, *rest = words
        sys.path.insert(0, os.getcwd())
        is_package = hasattr(sys.modules.get(name), "__path__")
        # Else it is said to have been imported before.
        sys.modules.pop(f"{name}.__main__" if is_package else name, None)
        sys.argv = ["-m", *rest]
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]
        return
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    main.__file__ = words[0]
    exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)
