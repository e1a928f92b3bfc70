"""``penstock`` and ``worker`` as a shell sees them, without an engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from penstock.ops import cli as penstock_cli
from penstock.shared.deployment.records import EngineHeartbeat, ModelCard
from penstock.shared.keys import Keys
from penstock.shared.messages.supervision import EngineState
from penstock.shared.redis_access.embedded import EmbeddedRedis, ServerFolder, stop
from penstock.worker import cli as worker_cli

from ..supervisor.conftest import DEADLINE_S, wait_until

pytestmark = pytest.mark.slow  # all of them: each starts programs

PENSTOCK, WORKER = "penstock.ops.cli", "penstock.worker.cli"


@pytest.fixture(autouse=True)
def _own_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("PENSTOCK_REDIS_URL", raising=False)
    yield
    stop(ServerFolder.prepare(tmp_path), force=True)


def run(program: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", program, *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def call(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Call a program in this process. Some tests start each program with ``run``; the others ask what it does."""
    main, out, err = {PENSTOCK: penstock_cli.main, WORKER: worker_cli.main}[program], StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main(list(arguments))
        except SystemExit as ended:
            status = int(ended.code or 0)
    return subprocess.CompletedProcess([program], status, out.getvalue(), err.getvalue())


def assert_fails_in_one_sentence(result: subprocess.CompletedProcess[str], status: int, *parts: str) -> None:
    assert result.returncode == status, result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr


def put_heartbeat(url: str, namespace: str, worker_id: str, index: int = 0, **fields: Any) -> None:
    """Enter an engine that no process beats for: it stays until it expires."""
    keys, engine_id = Keys(namespace), f"{worker_id}-{index}"
    beat = EngineHeartbeat(
        worker_id=worker_id,
        engine_id=engine_id,
        model="demo",
        state=EngineState.BUSY,
        host="host",
        supervisor_pid=10,
        worker_pid=11,
        core_pid=12,
        device="cpu",
        num_running_reqs=3,
        num_waiting_reqs=4,
        kv_cache_usage=0.25,
        tokens_per_s=99.6,
        worker_rss_bytes=50 << 20,
        core_rss_bytes=1 << 30,
    )
    beat = msgspec.structs.replace(beat, **fields)
    with redis.Redis.from_url(url) as client:
        client.sadd(keys.engines(), engine_id)
        client.set(keys.engine(engine_id), msgspec.json.encode(beat), ex=60)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "generate",
        "models",
        "redis",
        "redis status",
        "redis stop",
        "redis cli-path",
        "engine",
        "engine sleep",
        "engine profile start",
    ],
)
def test_penstock_has_help(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        penstock_cli.main([*path.split(), "--help"])
    assert f"usage: penstock {path}".strip() in capsys.readouterr().out


@pytest.mark.parametrize("path", ["", "start", "list", "drain", "stop"])
def test_worker_has_help(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        worker_cli.main([*path.split(), "--help"])
    assert f"usage: worker {path}".strip() in capsys.readouterr().out


def test_penstock_worker_is_worker() -> None:
    assert "usage: worker start" in run(PENSTOCK, "worker", "start", "--help").stdout
    assert "usage: worker start" in run("penstock.worker", "start", "--help").stdout
    assert run(PENSTOCK, "worker", "list").stdout == "no workers\n"


def test_version() -> None:
    assert run(PENSTOCK, "--version").stdout.startswith("penstock ")
    assert run(WORKER, "--version").stdout.startswith("worker ")


def test_embedded_redis_status_stop_and_client() -> None:
    status = call(PENSTOCK, "redis", "status")
    assert status.returncode == 1
    assert "not running" in status.stdout
    folder = ServerFolder.prepare()
    with EmbeddedRedis.start() as embedded, redis.Redis.from_url(embedded.url) as client:
        client.ping()
        status = call(PENSTOCK, "redis", "status")
        assert status.returncode == 0
        assert "running, process" in status.stdout
        assert folder.url in status.stdout
        assert_fails_in_one_sentence(run(PENSTOCK, "redis", "stop"), 1, "--force")
        client_program = call(PENSTOCK, "redis", "cli-path").stdout.strip()
        answer = subprocess.run([client_program, "-s", folder.socket, "ping"], capture_output=True, check=True)
        assert answer.stdout == b"PONG\n"
        assert run(PENSTOCK, "redis", "stop", "--force").returncode == 0
    assert run(PENSTOCK, "redis", "stop").stdout == "not running\n"


def test_models_as_table_and_json(redis_url: str, namespace: str) -> None:
    arguments = ("models", "--redis-url", redis_url, "--namespace", namespace)
    assert "no models" in run(PENSTOCK, *arguments).stdout
    card = ModelCard(model="demo", architecture="LlamaForCausalLM", max_model_len=256, vocab_size=300, dtype="bfloat16")
    with redis.Redis.from_url(redis_url) as client:
        client.hset(Keys(namespace).models(), card.model, msgspec.json.encode(card).decode())
    header, row = call(PENSTOCK, *arguments).stdout.splitlines()
    assert header.split()[0] == "MODEL"
    assert row.split() == ["demo", "LlamaForCausalLM", "256", "300", "bfloat16", "none"]
    assert json.loads(call(PENSTOCK, *arguments, "--json").stdout)[0]["max_model_len"] == 256
    put_heartbeat(redis_url, namespace, "host-1")
    assert call(PENSTOCK, *arguments).stdout.split()[-1] == "1"
    assert_fails_in_one_sentence(call(PENSTOCK, *arguments, "--forget", "demo"), 1, "it is served by host-1-0")
    with redis.Redis.from_url(redis_url) as client:
        client.delete(Keys(namespace).engine("host-1-0"))
    assert call(PENSTOCK, *arguments, "--forget", "demo").stdout == "forgotten: demo\n"
    assert_fails_in_one_sentence(call(PENSTOCK, *arguments, "--forget", "demo"), 1, "(known models: none)")
    assert "no models" in call(PENSTOCK, *arguments).stdout


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_the_output_is_a_sentence(redis_url: str, namespace: str, unbuffered: str) -> None:
    arguments = ["models", "--redis-url", redis_url, "--namespace", namespace]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "penstock.ops.cli", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert (ended.returncode, ended.stderr) == (
        1,
        "error: standard output cannot be written: No space left on device\n",
    )


def test_generate_without_a_model_is_a_sentence(redis_url: str, namespace: str) -> None:
    result = call(PENSTOCK, "generate", "hello", "--redis-url", redis_url, "--namespace", namespace)
    assert_fails_in_one_sentence(result, 1, "no worker has")
    result = call(PENSTOCK, "generate", "hello", "--temperature", "-1", "--redis-url", redis_url)
    assert_fails_in_one_sentence(result, 1, "temperature must be in")


@pytest.mark.parametrize("command", [(PENSTOCK, "models"), (WORKER, "list"), (WORKER, "drain")])
def test_unreachable_redis_is_a_sentence_without_the_password(command: tuple[str, str]) -> None:
    result = run(*command, "--redis-url", "redis://:secret@localhost:1")
    assert_fails_in_one_sentence(result, 1, "redis://:***@localhost:1", "Connection refused")
    assert "secret" not in result.stderr


def test_redis_url_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "http://wrong")
    assert_fails_in_one_sentence(run(WORKER, "list"), 1, "must begin with redis://")


def test_list_shows_heartbeats_and_drops_the_dead(redis_url: str, namespace: str) -> None:
    put_heartbeat(redis_url, namespace, "host-1")
    put_heartbeat(redis_url, namespace, "host-1", index=1)
    keys = Keys(namespace)
    with redis.Redis.from_url(redis_url) as client:
        client.sadd(keys.engines(), "host-0-0")
        arguments = ("list", "--redis-url", redis_url, "--namespace", namespace)
        header, first, second = call(WORKER, *arguments).stdout.splitlines()
        assert header.split()[:2] == ["WORKER", "ENGINE"]
        assert " ".join(first.split()) == "host-1 0 demo cpu busy 10/11/12 3/4 25% 0 100 1.0 GiB - - - - - - - -"
        assert second.split()[1] == "1"
        assert client.sismember(keys.engines(), "host-0-0") == 0
    beats = json.loads(call(WORKER, *arguments, "--json").stdout)
    assert [beat["engine_id"] for beat in beats] == ["host-1-0", "host-1-1"]


def test_drain_names_the_workers_it_knows(redis_url: str, namespace: str) -> None:
    arguments = ("--redis-url", redis_url, "--namespace", namespace)
    assert_fails_in_one_sentence(call(WORKER, "drain", *arguments), 1, "no worker is known", namespace)
    assert call(WORKER, "drain", "--all", *arguments).returncode == 0
    put_heartbeat(redis_url, namespace, "host-1")
    put_heartbeat(redis_url, namespace, "host-2")
    assert_fails_in_one_sentence(call(WORKER, "drain", "host-3", *arguments), 1, "'host-3'", "host-1, host-2")
    assert_fails_in_one_sentence(call(WORKER, "stop", *arguments), 2, "--all", "host-1, host-2")
    assert_fails_in_one_sentence(call(WORKER, "stop", "host-1", "--all", *arguments), 2, "either")


def test_drain_reports_the_number_of_running_requests_until_none_runs(redis_url: str, namespace: str) -> None:
    arguments = ("host-1", "--redis-url", redis_url, "--namespace", namespace)
    listed, err = "", StringIO()

    def beat(number: int) -> None:
        fields = {"num_running_reqs": number, "drains_until": time.time() + 3600}
        put_heartbeat(redis_url, namespace, "host-1", state=EngineState.DRAINING, **fields)

    def drain() -> None:
        nonlocal listed
        with redis.Redis.from_url(redis_url) as client, client.pubsub() as orders:
            orders.subscribe(Keys(namespace).worker_commands("host-1"))
            assert orders.get_message(timeout=DEADLINE_S)
            subscribed.set()
            assert orders.get_message(timeout=DEADLINE_S)
            for number, words in ((5, "5 requests are"), (1, "1 request is"), (0, "no request is")):
                beat(number)
                wait_until(lambda words=words: words in err.getvalue(), f"{words} is missing")
            listed = call(WORKER, "list", *arguments[1:]).stdout
            client.srem(Keys(namespace).engines(), "host-1-0")

    put_heartbeat(redis_url, namespace, "host-1")
    subscribed = threading.Event()
    with ThreadPoolExecutor(1) as pool, redirect_stderr(err):
        worker = pool.submit(drain)
        assert subscribed.wait(DEADLINE_S)
        assert worker_cli.main(["drain", *arguments]) == 0
        worker.result()
    limit = r", for at most 3[56]\d\d s\n"
    lines = ("5 requests are still running" + limit, "1 request is still running" + limit, "no request is running .*\n")
    assert re.fullmatch("".join(f"host-1 is draining: {line}" for line in lines), err.getvalue())
    assert "host-1 is draining: no request is running any more\n" in listed


def test_drain_of_a_worker_that_does_not_listen_times_out(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_heartbeat(redis_url, namespace, "host-1")
    monkeypatch.setattr("penstock.worker.cli.leave.MARGIN_S", 0.1)
    arguments = ["drain", "--timeout", "0.1", "--redis-url", redis_url, "--namespace", namespace]
    assert worker_cli.main(arguments) == 1
    assert "still there after 0.2 s: host-1" in capsys.readouterr().err
    (entry,) = json.loads(run(PENSTOCK, "audit", "--json", *arguments[3:]).stdout)
    assert (entry["action"], entry["target"], entry["via"]) == ("worker.drain", "host-1", "cli")
    assert entry["result"] != "ok"
