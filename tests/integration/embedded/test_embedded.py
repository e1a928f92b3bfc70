"""The embedded Redis, with real servers and real processes in folders of their own."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from penstock.shared.errors import ConfigurationError, RedisUnavailableError
from penstock.shared.redis_access.embedded import (
    EmbeddedRedis,
    ServerFolder,
    read_status,
    resolve_redis_url,
    server,
    stop,
)
from penstock.shared.values.data_folder import data_folder

from ...processes import DEADLINE_S

USER = """
import sys
from pathlib import Path
from penstock.shared.redis_access.embedded import EmbeddedRedis
with EmbeddedRedis.start(Path(sys.argv[1])) as embedded:
    print(embedded.url, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a busy machine keeps the server from seeing that somebody has gone."""
    monkeypatch.setattr(server, "LEAVE_TIMEOUT_S", 60.0)


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    stop(ServerFolder.prepare(tmp_path), force=True)


@pytest.fixture
def start_user(data_dir: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Start another process that uses the server until it is sent a line; returns when it has joined."""
    users: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        user = subprocess.Popen(
            [sys.executable, "-c", USER, str(data_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        users.append(user)
        assert user.stdout is not None
        assert user.stdout.readline().startswith("unix://")
        return user

    yield start
    for user in users:
        user.kill()
        user.communicate()


def leave(user: subprocess.Popen[str]) -> None:
    user.communicate("\n", timeout=DEADLINE_S)
    assert user.returncode == 0


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, "condition not met in time"
        time.sleep(0.01)


def pid_of(data_dir: Path) -> int:
    status = read_status(ServerFolder.prepare(data_dir))
    assert status is not None
    return status.pid


def test_serves_on_a_private_socket_only_and_keeps_everything(data_dir: Path) -> None:
    with EmbeddedRedis.start(data_dir) as embedded, redis.Redis.from_url(embedded.url) as client:
        expected = {"port": "0", "appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction"}
        assert {name: client.config_get(name) for name in expected} == {k: {k: v} for k, v in expected.items()}
        folder = ServerFolder.prepare(data_dir)
        assert stat.S_IMODE(folder.socket.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(folder.socket.stat().st_mode) == 0o700
        # A session of its own: Ctrl-C in this terminal does not reach it.
        assert os.getsid(pid_of(data_dir)) != os.getsid(0)


def test_last_user_stops_it_and_the_next_finds_the_data(data_dir: Path) -> None:
    with EmbeddedRedis.start(data_dir) as embedded, redis.Redis.from_url(embedded.url) as client:
        client.set("kept", "1")
    assert read_status(ServerFolder.prepare(data_dir)) is None
    with EmbeddedRedis.start(data_dir) as embedded, redis.Redis.from_url(embedded.url) as client:
        assert client.get("kept") == b"1"


def test_users_of_two_processes_share_it(data_dir: Path, start_user: Callable[[], subprocess.Popen[str]]) -> None:
    ours = EmbeddedRedis.start(data_dir)
    pid = pid_of(data_dir)
    other = start_user()
    ours.close()
    ours.close()
    assert pid_of(data_dir) == pid
    leave(other)
    assert read_status(ServerFolder.prepare(data_dir)) is None


def test_starter_may_leave_first(data_dir: Path, start_user: Callable[[], subprocess.Popen[str]]) -> None:
    starter = start_user()
    with EmbeddedRedis.start(data_dir) as embedded:
        leave(starter)
        with redis.Redis.from_url(embedded.url) as client:
            assert client.ping()


def test_a_killed_user_is_not_counted(data_dir: Path, start_user: Callable[[], subprocess.Popen[str]]) -> None:
    crashed = start_user()
    with EmbeddedRedis.start(data_dir):
        crashed.kill()
        crashed.wait(timeout=DEADLINE_S)
    assert read_status(ServerFolder.prepare(data_dir)) is None


def test_connected_client_keeps_it_alive(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "LEAVE_TIMEOUT_S", 0.5)
    embedded = EmbeddedRedis.start(data_dir)
    with redis.Redis.from_url(embedded.url) as client:
        client.ping()
        embedded.close()
        assert client.ping()
    monkeypatch.setattr(server, "LEAVE_TIMEOUT_S", 60.0)
    with EmbeddedRedis.start(data_dir):
        pass
    assert read_status(ServerFolder.prepare(data_dir)) is None


def test_many_starters_get_one_server(data_dir: Path) -> None:
    command = [sys.executable, "-c", USER, str(data_dir)]
    users = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    urls = {user.stdout.readline() for user in users if user.stdout is not None}
    assert len(urls) == 1
    pid = pid_of(data_dir)
    for user in users[:-1]:
        leave(user)
    assert pid_of(data_dir) == pid
    leave(users[-1])
    assert read_status(ServerFolder.prepare(data_dir)) is None


def test_a_killed_server_restarts_with_its_data(data_dir: Path) -> None:
    folder = ServerFolder.prepare(data_dir)
    crashed = EmbeddedRedis.start(data_dir)
    with redis.Redis.from_url(crashed.url) as client:
        client.set("kept", "1")
    os.kill(pid_of(data_dir), signal.SIGKILL)
    wait_until(lambda: not folder.is_running())
    # The kernel leaves socket and pid file behind.
    assert folder.socket.exists()
    assert folder.pid_file.exists()
    with EmbeddedRedis.start(data_dir) as embedded, redis.Redis.from_url(embedded.url) as client:
        assert client.get("kept") == b"1"
        crashed.close()
        assert client.ping()


def test_closing_after_the_server_died_is_no_error(data_dir: Path) -> None:
    embedded = EmbeddedRedis.start(data_dir)
    os.kill(pid_of(data_dir), signal.SIGKILL)
    wait_until(lambda: not ServerFolder.prepare(data_dir).is_running())
    embedded.close()


def test_pid_file_of_a_foreign_process_is_ignored(data_dir: Path) -> None:
    folder = ServerFolder.prepare(data_dir)
    folder.pid_file.write_text(f"{os.getpid()}\n")
    folder.socket.touch()
    with EmbeddedRedis.start(data_dir) as embedded, redis.Redis.from_url(embedded.url) as client:
        assert client.ping()


def test_a_server_without_its_socket_is_replaced(data_dir: Path) -> None:
    folder = ServerFolder.prepare(data_dir)
    lost = EmbeddedRedis.start(data_dir)
    with redis.Redis.from_url(lost.url) as client:
        client.set("kept", "1")
    pid = pid_of(data_dir)
    folder.socket.unlink()
    with EmbeddedRedis.start(data_dir) as embedded, redis.Redis.from_url(embedded.url) as client:
        assert client.get("kept") == b"1"
        assert pid_of(data_dir) != pid
        lost.close()


def test_long_folder_gets_a_short_socket(data_dir: Path) -> None:
    deep = data_dir / ("a" * 60) / ("b" * 60)
    folder = ServerFolder.prepare(deep)
    try:
        with EmbeddedRedis.start(deep) as embedded, redis.Redis.from_url(embedded.url) as client:
            assert client.ping()
            assert folder.socket.parent.parent == Path("/tmp")
            assert stat.S_IMODE(folder.socket.parent.stat().st_mode) == 0o700
    finally:
        folder.socket.parent.rmdir()


def test_path_with_spaces_and_percent(data_dir: Path) -> None:
    with EmbeddedRedis.start(data_dir / "a b%20c") as embedded, redis.Redis.from_url(embedded.url) as client:
        assert client.ping()


def test_broken_data_is_reported_with_the_servers_own_words(data_dir: Path) -> None:
    folder = ServerFolder.prepare(data_dir)
    (folder.root / "appendonly.aof").write_bytes(b"this is no append-only file\n" * 10)
    with pytest.raises(RedisUnavailableError, match=r"did not start; its log .*redis\.log ends with: .*append"):
        EmbeddedRedis.start(data_dir)
    assert not folder.is_running()


def test_a_folder_that_cannot_be_created_is_an_error(data_dir: Path) -> None:
    (data_dir / "file").touch()
    with pytest.raises(ConfigurationError, match="PENSTOCK_DATA_DIR"):
        EmbeddedRedis.start(data_dir / "file")


def test_symbolic_link_planted_in_place_of_the_folder_is_refused(data_dir: Path) -> None:
    (data_dir / "elsewhere").mkdir()
    (data_dir / "planted").mkdir()
    (data_dir / "planted" / "redis").symlink_to(data_dir / "elsewhere")
    with pytest.raises(ConfigurationError, match="another user"):
        EmbeddedRedis.start(data_dir / "planted")


def test_stop_refuses_while_in_use(data_dir: Path) -> None:
    folder = ServerFolder.prepare(data_dir)
    assert stop(folder) is False
    with EmbeddedRedis.start(data_dir):
        with pytest.raises(ConfigurationError, match="--force"):
            stop(folder)
        assert stop(folder, force=True) is True
        assert read_status(folder) is None


def test_url_is_explicit_then_environment_then_embedded(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(data_dir))
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://from-environment")
    with resolve_redis_url("redis://explicit") as url:
        assert url == "redis://explicit"
    with resolve_redis_url(None) as url:
        assert url == "redis://from-environment"
    monkeypatch.delenv("PENSTOCK_REDIS_URL")
    with resolve_redis_url(None) as url:
        assert url == ServerFolder.prepare(data_dir).url
        assert pid_of(data_dir)
    assert read_status(ServerFolder.prepare(data_dir)) is None
    with pytest.raises(ConfigurationError, match="must begin with"):
        resolve_redis_url("http://localhost")


def test_data_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PENSTOCK_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert data_folder() == tmp_path / "penstock"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folder() == tmp_path / ".local" / "share" / "penstock"
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path / "own"))
    assert data_folder() == tmp_path / "own"


@pytest.mark.parametrize(
    "ending",
    [
        "llm = LLM()\nraise ValueError('the error of the script')",
        "llm = LLM()\nimport sys\nsys.exit(3)",
        "llm = LLM()",
        "def work():\n    llm = LLM()\nwork()",
        "llm = LLM()\nllm.itself = llm\ndel llm\nimport gc\ngc.collect()",
        "llm = LLM()\nimport os\nif os.fork():\n    os.wait()",
        "import asyncio\nfrom penstock.producer import Client\n"
        "async def main():\n    async with Client.connect() as client:\n        assert await client.models() == {}\n"
        "asyncio.run(main())",
    ],
    ids=["exception", "exit", "end", "forgotten", "cycle", "fork", "client"],
)
def test_script_that_leaves_its_llm_open_leaves_no_server(data_dir: Path, ending: str) -> None:
    # A machine that is very busy keeps the server from seeing for a while that the client has left.
    patience = "from penstock.shared.redis_access.embedded import server\nserver.LEAVE_TIMEOUT_S = 60.0\n"
    script = f"{patience}from penstock.producer import LLM\n{ending}\n"
    environment = {**os.environ, "PENSTOCK_DATA_DIR": str(data_dir)}
    environment.pop("PENSTOCK_REDIS_URL", None)
    # Python 3.12 and later warn of a fork beside the client's thread.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = ended.stderr.splitlines()
    if "raise" in ending:
        assert [lines[0], lines[-1]] == ["Traceback (most recent call last):", "ValueError: the error of the script"]
        assert sum("Traceback" in line for line in lines) == 1
    else:
        assert lines == []
    assert ended.returncode == (1 if "raise" in ending else 3 if "exit" in ending else 0)
    assert read_status(ServerFolder.prepare(data_dir)) is None
