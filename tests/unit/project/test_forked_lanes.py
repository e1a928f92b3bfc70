"""Forks in the place of starts: lanes, and programs that behave as those that Python starts."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ...processes import DEADLINE_S
from ...warm_python import WARM_PYTHON_VARIABLE, WarmProgram

PYTHON = sys.executable
# Asks for all that a program is given, and ends in the requested way.
PROGRAM = """
import os, sys
print(sys.argv[1], sys.argv[3], os.getcwd(), os.environ["GIVEN"], sys.stdin.read(), __name__, sys.path[0])
print("aside", file=sys.stderr)
os.write(int(sys.argv[2]), b"further")
sys.exit({"status": 3, "words": "no such thing", "none": None}[sys.argv[1]] if sys.argv[1] != "raise" else 1 / 0)
"""
WAITS = """
import os, signal, sys, time
if sys.argv[1] == "heeds":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(os.getpid(), flush=True)
while True:
    time.sleep(60)
"""


def test_a_program_of_a_run_with_lanes_has_its_imports(tmp_path: Path, warm_python: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"import sys; sys.exit(10 + ('redis' in sys.modules) + 2 * ({__name__!r} in sys.modules))")
    status = subprocess.run([warm_python, str(program)], check=False).returncode
    assert status == 10 + (WARM_PYTHON_VARIABLE in os.environ)


@pytest.mark.parametrize("ending", ["status", "words", "none", "raise"])
def test_a_forked_program_has_the_same_input_and_output(tmp_path: Path, warm_python: str, ending: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def run(python: str) -> tuple[int, str, list[str]]:
        with (tmp_path / "further").open("w+b") as further:
            result = subprocess.run(
                [python, str(program), ending, str(further.fileno()), "é"],
                input="asked",
                cwd=tmp_path,
                env={**os.environ, "GIVEN": "things"},
                pass_fds=[further.fileno()],
                capture_output=True,
                text=True,
                check=False,
            )
            assert further.seek(0) == 0
            assert further.read() == b"further"
        return result.returncode, result.stdout, result.stderr.splitlines()

    cold, warm = run(PYTHON), run(warm_python)
    assert warm[:2] == cold[:2]
    # The last line of a traceback names the exception.
    assert (warm[2][0], warm[2][-1]) == (cold[2][0], cold[2][-1])


def test_a_module_is_run_as_the_program(warm_python: str) -> None:
    command = [warm_python, "-m", "penstock.worker.engine.offline", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: ")


@pytest.mark.parametrize(("how", "status"), [("heeds", 7), ("dies", -signal.SIGTERM)])
def test_a_signal_reaches_the_program(tmp_path: Path, warm_python: str, how: str, status: int) -> None:
    process, _ = start_waiting(tmp_path, warm_python, how)
    process.terminate()
    assert process.wait() == status


def test_killing_the_proxy_kills_the_program(tmp_path: Path, warm_python: str) -> None:
    process, program = start_waiting(tmp_path, warm_python, "heeds")
    process.kill()
    process.wait()
    await_end(program)


def test_a_proxy_killed_early_kills_the_program_too(tmp_path: Path) -> None:
    if WARM_PYTHON_VARIABLE not in os.environ:
        pytest.skip("programs are started in a run without lanes")
    path = tmp_path / "program.py"
    path.write_text(WAITS)
    request = json.dumps([PYTHON, [str(path), "heeds"], str(tmp_path), dict(os.environ), [1]]).encode()
    ours, theirs = os.pipe()
    with socket.socket(socket.AF_UNIX) as asking, open(ours) as file:
        asking.connect(str(Path(os.environ[WARM_PYTHON_VARIABLE]).with_name("socket")))
        socket.send_fds(asking, [len(request).to_bytes(4, "big")], [theirs])
        asking.sendall(request)
        os.close(theirs)
        program = psutil.Process(int(file.readline()))
        select.select([asking], [], [])
    await_end(program)


def test_a_warm_program_is_the_process_that_its_test_started(tmp_path: Path) -> None:
    if WARM_PYTHON_VARIABLE not in os.environ:
        pytest.skip("programs are started in a run without lanes")
    path = tmp_path / "program.py"
    path.write_text(WAITS)
    heeds = WarmProgram([PYTHON, str(path), "heeds"], stdout=subprocess.PIPE)
    assert heeds.stdout is not None
    assert int(heeds.stdout.readline()) == heeds.pid
    assert heeds.poll() is None
    heeds.send_signal(signal.SIGSTOP)
    program, give_up_at = psutil.Process(heeds.pid), time.monotonic() + 60
    while program.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < give_up_at, "it does not stop"
    heeds.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        heeds.wait(0)
    heeds.send_signal(signal.SIGCONT)
    assert heeds.wait(DEADLINE_S) == 7
    heeds.terminate()  # no program's any more
    with (tmp_path / "out").open("w") as out:
        dies = WarmProgram([PYTHON, str(path), "dies"], stdout=out)
    dies.kill()
    assert dies.wait() == dies.poll() == -signal.SIGKILL
    heeds.stdout.close()


def start_waiting(folder: Path, python: str, how: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    program = folder / "program.py"
    program.write_text(WAITS)
    process = subprocess.Popen([python, str(program), how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        return process, psutil.Process(int(process.stdout.readline()))


def await_end(program: psutil.Process) -> None:
    give_up_at = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):
        while program.is_running() and program.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < give_up_at, "the program lives on"
            time.sleep(0.01)
