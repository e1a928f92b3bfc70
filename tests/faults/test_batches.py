"""A file of requests survives whatever dies, or sleeps, while it is run: one right line for each row."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from penstock.ops.demo.task import number_words
from penstock.ops.local.stack import LocalStack

from ..gate import Gate
from ..processes import DEADLINE_S
from .conftest import Start
from .watching import beating, until

NUMBERS = range(100, 170)


class Command:
    """Starts of one `penstock batch run`, each a process of its own, and their progress so far."""

    def __init__(self, folder: Path, stack: LocalStack, processes: ExitStack) -> None:
        self.output = folder / "out.jsonl"
        self._files = folder / "files"
        self._processes = processes
        source = folder / "in.jsonl"
        source.write_bytes(b"\n".join(map(row, NUMBERS)))
        self._command = [sys.executable, "-m", "penstock.ops.cli", "batch", "run", str(source), "-o", str(self.output)]
        self._command += ["--redis-url", stack.url, "--files-dir", str(self._files)]
        self._command += ["--concurrency", "3", "--lease-ttl", "1"]

    def start(self) -> subprocess.Popen[str]:
        process = self._processes.enter_context(
            subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                # A shell's background commands ignore SIGINT, and so would this program, its heir.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        )
        self._processes.callback(process.kill)
        return process

    def journals(self) -> list[int]:
        """Return the number of lines that each runner has written, the first runner first."""
        return [path.read_bytes().count(b"\n") for path in sorted(self._files.glob("work/*/rows-*"))]

    async def has_done(self, num_rows: int, runner: int) -> None:
        """Wait until a runner, counted from 0, has done this many rows."""

        def has() -> bool:
            journals = self.journals()
            return len(journals) > runner and journals[runner] >= num_rows

        await until(has, what=f"runner {runner} does not come to {num_rows} rows")
        assert sum(self.journals()) < len(NUMBERS), "all was done before the fault"

    def check(self) -> None:
        """Each row has one line, with the right answer."""
        errors = self.output.with_suffix(".errors.jsonl")
        assert not errors.exists(), errors.read_text()
        lines = [msgspec.json.decode(line) for line in self.output.read_bytes().splitlines()]
        assert sorted(line["custom_id"] for line in lines) == [f"row-{number}" for number in NUMBERS]
        for line in lines:
            number = int(line["custom_id"].removeprefix("row-"))
            assert line["response"]["status_code"] == 200
            assert line["response"]["body"]["choices"][0]["text"] == f" {number_words(number)}."


def row(number: int) -> bytes:
    body = {"model": "demo", "prompt": f"spell {number}:", "temperature": 0, "max_tokens": 24}
    return msgspec.json.encode({"custom_id": f"row-{number}", "method": "POST", "url": "/v1/completions", "body": body})


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[[LocalStack, str], Command]]:
    with ExitStack() as processes:

        def make(stack: LocalStack, name: str) -> Command:
            folder = tmp_path / name
            folder.mkdir()
            return Command(folder, stack, processes)

        yield make


async def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return exit status and standard error."""
    async with asyncio.timeout(DEADLINE_S):
        _, printed = await asyncio.to_thread(process.communicate)
    return process.returncode, printed


async def test_rows_survive_every_death_and_a_runner_that_wakes_up(
    start: Start, gate: Gate, command: Callable[[LocalStack, str], Command]
) -> None:
    """The gate lets fewer rows end than there are before the last fault."""
    stack = await start(1)
    killed, stale = command(stack, "killed"), command(stack, "stale")

    gate.let_end(5)
    process = await asyncio.to_thread(killed.start)
    await killed.has_done(1, 0)
    process.kill()
    gate.let_end(15)
    interrupted = await asyncio.to_thread(killed.start)
    await killed.has_done(10, 1)
    interrupted.send_signal(signal.SIGINT)
    assert await ended(interrupted) == (130, "stopped; run the same command again to resume\n")
    assert not killed.output.exists()
    gate.let_end(8)
    last = await asyncio.to_thread(killed.start)
    await killed.has_done(5, 2)
    (beat,) = await beating(stack.url, 1)
    os.kill(beat.core_pid, signal.SIGKILL)
    await killed.has_done(12, 2)
    await asyncio.to_thread(stack.kill_redis)
    await asyncio.to_thread(stack.restart_redis)
    gate.open()
    await ended(last)
    killed.check()

    gate.let_end(15)
    sleeper = await asyncio.to_thread(stale.start)
    await stale.has_done(10, 0)
    sleeper.send_signal(signal.SIGSTOP)
    gate.let_end(15)
    other = await asyncio.to_thread(stale.start)
    await stale.has_done(10, 1)
    sleeper.send_signal(signal.SIGCONT)
    status, printed = await ended(sleeper)
    assert status == 1
    assert "taken over by another" in printed
    gate.open()
    await ended(other)
    stale.check()
