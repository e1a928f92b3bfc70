"""``penstock queue show --watch``: redrawn on a terminal, a line each elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from penstock.ops import cli as penstock_cli
from penstock.shared.broker import Queue
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import ModelCard
from penstock.shared.keys import Keys
from penstock.shared.process.command_line import EXIT_USAGE

from ...redis_server import RedisServer


def command(url: str, namespace: str, *options: str) -> list[str]:
    watch = ["queue", "show", "m", "--watch", "0.1", "--redis-url", url, "--namespace", namespace]
    return [sys.executable, "-m", "penstock.ops.cli", *watch, *options]


@contextlib.contextmanager
def running(words: list[str], **options: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(words, text=True, **options)  # type: ignore[call-overload]  # its streams
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def queue_of(url: str, namespace: str) -> tuple[CommandConnection, Queue]:
    connection, keys = CommandConnection(url), Keys(namespace)
    await connection.execute("HSET", keys.models(), "m", msgspec.json.encode(ModelCard(model="m")))
    return connection, Queue(connection, keys.model("m"))


async def test_lines_follow_the_queue_and_a_lost_redis_is_a_sentence(server: RedisServer, namespace: str) -> None:
    connection, queue = await queue_of(server.url, namespace)
    words = command(server.url, namespace)
    with running(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert " m open: waiting 0, running 0, " in process.stdout.readline()
        await queue.pause(put_back=False)
        assert any(" m paused: waiting 0" in line for line in process.stdout)
        server.kill()
        assert any("Redis" in line for line in process.stderr)
        server.start()
        server.wait_until_ready()
        await queue.resume()
        assert any(" m open: waiting 0" in line for line in process.stdout)
    await connection.close()


async def test_json_is_a_line_each(redis_url: str, namespace: str) -> None:
    connection, _ = await queue_of(redis_url, namespace)
    with running(command(redis_url, namespace, "--json"), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        looks = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert [look["model"] for look in looks] == ["m", "m"]
    await connection.close()


async def test_a_terminal_is_drawn_over(redis_url: str, namespace: str) -> None:
    connection, queue = await queue_of(redis_url, namespace)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "40", "LINES": "10"}
    with running(command(redis_url, namespace), stdout=theirs, env=environment):
        os.close(theirs)
        told = b""
        while b"open" not in told:
            told += os.read(ours, 4096)
        await queue.pause(put_back=False)
        while b"paused since" not in told:
            told += os.read(ours, 4096)
        drawn = told.decode(errors="replace").split("\x1b[H")
        assert drawn[0] == ""
        assert len(drawn) > 2
        for one in drawn[1:-1]:
            lines = one.replace("\x1b[K", "").removesuffix("\x1b[J").splitlines()
            assert len(lines) < 10
            assert all(len(line) <= 40 for line in lines)
    await connection.close()


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "inf"])
def test_invalid_watch_intervals_are_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        penstock_cli.main(["queue", "show", "m", f"--watch={seconds}"])
    assert ended.value.code == EXIT_USAGE
    assert f"at least 0.1, got {seconds!r}" in capsys.readouterr().err
