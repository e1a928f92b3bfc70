"""Runs one program within a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_MAX_WORDS_CHARS = 1500
# Nothing must be downloaded, and without a network each attempt takes minutes.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Ended:
    """Result of a program: ``error`` is empty on success, else the reason and the last lines."""

    error: str
    words: str

    @property
    def is_well(self) -> bool:
        return not self.error


def run_program(
    command: Sequence[str], log: Path, limit_s: float, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run ``command``, its output into ``log``; after ``limit_s`` it is killed with all its children."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**_own_environment(), **_ENVIRONMENT, **(environment or {})},
            start_new_session=True,
        )
        try:
            returncode = process.wait(max(limit_s, 1.0))
            error = "" if returncode == 0 else f"ended with {returncode}"
        except subprocess.TimeoutExpired:
            error = f"not done within {limit_s:.0f} s"
        finally:
            # Processes that it left behind would compute during the next part.
            _kill_group(process.pid)
            process.wait()
    words = log.read_text(errors="replace").strip()[-_MAX_WORDS_CHARS:]
    return Ended(f"{error}: {words.splitlines()[-1] if words else 'it said nothing'}" if error else "", words)


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all have ended


def _own_environment() -> dict[str, str]:
    """Return the environment without pytest's variables, which a nested pytest would take for its own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
