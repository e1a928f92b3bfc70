"""An engine of one Python program: a private Redis and a worker, which end with the program, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...shared.errors import ConfigurationError, EngineDeadError

_READY = "ready: "
# They name a deployment, which this engine does not belong to.
_VARIABLES_OF_A_DEPLOYMENT = ("PENSTOCK_REDIS_URL", "PENSTOCK_SHARDS", "PENSTOCK_NAMESPACE")


class OwnEngine:
    """A ``penstock.ops.local`` in a process of its own. Creating it waits until the engine serves.

    Args:
        model: folder, GGUF file or hub name.
        options: options of ``worker start`` by their names in Python: ``max_model_len=4096``.
        on_death: called with the reason, in another thread, if the engine ends for good before ``close``.

    Attributes:
        url: URL of the private Redis.

    Raises:
        ConfigurationError: the engine did not start; the message has the reason, and the log after it.
    """

    def __init__(
        self, model: str | Path, options: Mapping[str, Any], on_death: Callable[[EngineDeadError], object]
    ) -> None:
        # Ctrl-C must reach only this program, which then stops the engine: so it has a session of its own.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.ops.local", str(os.getpid()), str(model), *_command_words(options)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if not name.startswith(_VARIABLES_OF_A_DEPLOYMENT)},
        )
        self._owner_pid = os.getpid()
        self._on_death = on_death
        self._is_closing = False
        try:
            self.url = self._await_ready()
        except BaseException:
            self.end()
            assert self._process.stdout is not None
            self._process.stdout.close()
            raise
        self._watching = threading.Thread(target=self._await_death, name="penstock-own-engine", daemon=True)
        self._watching.start()

    def end(self) -> None:
        """Stop the engine and its Redis, and wait for their end. Does nothing in a forked child, or a second time."""
        if self._is_closing or os.getpid() != self._owner_pid:
            return
        self._is_closing = True
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()

    def _await_ready(self) -> str:
        lines: list[str] = []
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_READY):
                return line.removeprefix(_READY).strip()
            lines.append(line)
        raise ConfigurationError(_reason_and_log(lines))

    def _await_death(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            lines = list(output)
        if not self._is_closing:
            self._on_death(EngineDeadError(_reason_and_log(lines)))


def _reason_and_log(lines: list[str]) -> str:
    """Return the last line of a program that failed, its error, and then what it wrote before."""
    *rest, last = [line.rstrip("\n") for line in lines if line.strip()] or ["the engine was killed"]
    return "\n".join((last.removeprefix("error: "), *rest))


def _command_words(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield options with Python values as words of a command line. None leaves an option out."""
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        elif isinstance(value, Mapping):
            yield f"--{flag}={json.dumps(value)}"
        elif isinstance(value, list | tuple):
            yield f"--{flag}={','.join(map(str, value))}"
        elif value is not None:
            yield f"--{flag}={value}"
