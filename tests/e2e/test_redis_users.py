"""Users of Redis with the rights that `penstock redis users` gives them, and no others, can do all that their part does.

Redis notes every command, key and channel that it denied (ACL LOG), so nothing that was denied goes unseen.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from penstock.ops.local_server import LocalGateway, LocalServer
from penstock.ops.local_worker import LocalWorker
from penstock.producer import Client, SamplingParams
from penstock.producer.jobs import JobSet, JobSettings
from penstock.shared.keys import Keys
from penstock.shared.redis_users import Role, rights

from ..redis_server import RedisServer

OPTIONS = ["--device", "cpu", "--served-model-name", "demo", "--threads", "1", "--max-num-seqs", "16"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8)
ROOT = Path(__file__).parents[2]
KEYS = Keys()
# What the tests of the broker look at themselves, which no process of ours does.
OF_TESTS = ["+scan", "+keys", "+object", "+debug", "+config", "+script", "+client", "+xinfo", "+acl", "+flushdb"]


class Users:
    """A Redis on which nobody but these users may do anything, and what it denied them.

    Args:
        secrets: the folder that `penstock redis users` has made.
    """

    def __init__(self, server: RedisServer, secrets: Path) -> None:
        self._server = server
        self._logins = {
            role: (secrets / f"{role}.url").read_text().strip().removeprefix("redis://").partition("@")[0]
            for role in Role
        }
        self.redis = redis.Redis.from_url(self.url_as("judge:any"))

    def url(self, role: Role) -> str:
        return self.url_as(self._logins[role])

    def url_as(self, login: str) -> str:
        return self._server.url.replace("unix://", f"unix://{login}@")

    def denied(self) -> list[dict[str, Any]]:
        """What was denied since this was last asked."""
        entries: Any = self.redis.acl_log(count=1000)
        self.redis.acl_log_reset()
        return [{name: entry[name] for name in ("username", "reason", "context", "object")} for entry in entries]


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    secrets = tmp_path_factory.mktemp("made") / "secrets"
    made = run_command("redis", "users", str(secrets))
    assert made.returncode == 0, made.stderr
    acl = secrets / "users.acl"
    # One that may look at what was denied.
    acl.write_text(f"{acl.read_text()}user judge on nopass ~* &* +@all\n")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start("--aclfile", str(acl), "--appendfsync", "everysec")
    users = Users(server, secrets)
    wait_until_it_answers(users.redis)
    try:
        yield users
    finally:
        users.redis.close()
        server.kill()


def wait_until_it_answers(client: redis.Redis) -> None:
    for _ in range(10_000):
        try:
            client.ping()
            return
        except redis.ConnectionError:
            os.sched_yield()
    raise AssertionError("redis-server does not answer")


@pytest.fixture(scope="module")
def worker(users: Users, tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[LocalWorker]:
    log = tmp_path_factory.mktemp("worker") / "worker.log"
    worker = LocalWorker(str(demo_model), users.url(Role.WORKER), OPTIONS, log)
    worker.spawn()
    try:
        worker.await_ready()
        yield worker
    finally:
        worker.stop()


async def test_apps_and_jobs(users: Users, worker: LocalWorker) -> None:
    async with Client.connect(users.url(Role.CLIENT)) as client:
        streamed = [delta async for delta in client.stream("count from one to three:", PARAMS)]
        handle = await client.submit("count from one to three:", PARAMS)
        assert (await handle.result()).text == "".join(delta.text for delta in streamed)
        left = await client.submit("count from one to three:", PARAMS)
        await left.cancel()
        assert await client.models()
        async with client.converse(PARAMS) as conversation:
            await conversation.send("count from one to three:")
            assert [delta async for delta in conversation.segment()]
            await conversation.close_input()
    settings = JobSettings(redis_url=users.url(Role.JOBS))
    pool = JobSet(settings).pool()
    job = await pool.enqueue_job("generate", "count from one to three:", {"temperature": 0.0, "max_tokens": 8})
    assert job is not None
    done = await asyncio.to_thread(run_command, "jobs", "--burst", url=users.url(Role.JOBS))
    assert done.returncode == 0, done.stderr[-3000:]
    assert (await job.result(timeout=30))["outputs"]
    await pool.aclose(close_connection_pool=True)
    assert users.denied() == []


async def test_the_gateway(users: Users, worker: LocalWorker, tmp_path: Path) -> None:
    made = await asyncio.to_thread(run_command, "keys", "create", "acme", url=users.url(Role.OPERATOR))
    assert made.returncode == 0, made.stderr
    key = next(word for word in made.stdout.split() if word.startswith("sk-"))
    options = ["--api-keys", "on", "--files-dir", str(tmp_path / "files"), "--workers", "2"]
    gateway = LocalGateway(users.url(Role.GATEWAY), options, tmp_path / "gateway.log")
    await asyncio.to_thread(gateway.start)
    try:
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=gateway.root_url, headers=headers, timeout=60) as http:
            chat = {"messages": [{"role": "user", "content": "count from one to three:"}], "max_tokens": 8}
            assert (await http.post("/v1/chat/completions", json=chat | {"stream": True})).status_code == 200
            response = (await http.post("/v1/responses", json={"input": "count from one to three:"})).json()
            assert (await http.get(f"/v1/responses/{response['id']}")).json()["id"] == response["id"]
            row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}
            sent = {"purpose": (None, "batch"), "file": ("rows.jsonl", httpx.Response(200, json=row).content)}
            file = (await http.post("/v1/files", files=sent)).json()
            batch = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            batch_id = (await http.post("/v1/batches", json=batch)).json()["id"]
            for path in ("/health", "/ready", "/metrics", "/v1/models", "/v1/files", f"/v1/batches/{batch_id}"):
                assert (await http.get(path)).status_code == 200, path
            files_dir = ["--files-dir", str(tmp_path / "files")]
            done = await asyncio.to_thread(run_command, "jobs", "--burst", *files_dir, url=users.url(Role.JOBS))
            assert done.returncode == 0, done.stderr[-3000:]
            assert (await http.get(f"/v1/batches/{batch_id}")).json()["status"] == "completed"
    finally:
        await asyncio.to_thread(gateway.stop)
    assert users.denied() == []


async def test_operators(users: Users, worker: LocalWorker, tmp_path: Path) -> None:
    url = users.url(Role.OPERATOR)
    dashboard = LocalServer("dashboard", url, [], tmp_path / "dashboard.log")
    await asyncio.to_thread(dashboard.start)
    try:
        async with httpx.AsyncClient(base_url=dashboard.base_url, timeout=60, follow_redirects=True) as http:
            pages = ("/", "/queue/demo", "/requests", "/engines", "/dead", "/batches", "/webhooks", "/system", "/audit")
            for path in pages:
                assert (await http.get(path)).status_code == 200, path
    finally:
        await asyncio.to_thread(dashboard.stop)
    for command in (["status"], ["queue", "show", "demo"], ["queue", "pause", "demo"], ["queue", "resume", "demo"]):
        done = await asyncio.to_thread(run_command, *command, url=url)
        assert done.returncode == 0, done.stderr[-3000:]
    assert users.denied() == []


def test_the_contract_of_the_broker_holds_for_a_worker(users: Users) -> None:
    """The tests of the broker, as a user with a worker's commands in the namespaces of tests."""
    words = [word.replace("penstock", "test-*") for word in rights(Role.WORKER, "penstock")]
    users.redis.execute_command("ACL", "SETUSER", "tester", "on", ">any", *words, *OF_TESTS)
    environment = os.environ | {"PENSTOCK_TEST_REDIS_URL": users.url_as("tester:any")}
    tests = ["test_states.py", "test_deaths.py", "test_input.py", "test_waves.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not on_cluster"]
    command += [f"tests/integration/broker/{name}" for name in tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert users.denied() == []


@pytest.mark.parametrize(
    ("role", "command"),
    [
        (Role.CLIENT, ("HGETALL", KEYS.operator_keys())),
        (Role.CLIENT, ("HGETALL", KEYS.api_keys())),
        (Role.CLIENT, ("GET", KEYS.dashboard_secret())),
        (Role.WORKER, ("HGETALL", KEYS.api_keys())),
        (Role.WORKER, ("HGETALL", KEYS.webhook_secrets())),
        (Role.WORKER, ("XADD", KEYS.audit(), "*", "who", "somebody else")),
        (Role.GATEWAY, ("HGETALL", KEYS.operator_keys())),
        (Role.GATEWAY, ("GET", KEYS.dashboard_secret())),
        (Role.JOBS, ("HGETALL", KEYS.operator_keys())),
        *((role, ("GET", "somebody:elses")) for role in Role),
        *((role, command) for role in Role for command in (("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "GET", "*"))),
    ],
)
def test_what_a_role_may_not(users: Users, role: Role, command: tuple[str, ...]) -> None:
    with redis.Redis.from_url(users.url(role)) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command)
    users.denied()


def run_command(*arguments: str, url: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.ops.cli", *arguments]
    environment = os.environ | ({"PENSTOCK_REDIS_URL": url} if url else {})
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
