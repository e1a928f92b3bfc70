"""Users of Redis with the rights that `penstock redis users` gives them may do what they need, and nothing else.

That each process can do its part with them is tested with the compose file (``tests/e2e/deploy``).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError

from penstock.shared.keys import Keys
from penstock.shared.redis_access.users import Role, rights

from ..redis_server import RedisServer

# One server for all.
pytestmark = pytest.mark.xdist_group("redis_users")

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
    deadline = time.monotonic() + 60
    while True:
        try:
            client.ping()
            return
        except redis.ConnectionError:
            time.sleep(0.01)
        assert time.monotonic() < deadline, "redis-server does not answer"


def test_the_contract_of_the_broker_holds_for_a_worker(users: Users) -> None:
    """The tests of the broker, as a user with a worker's commands in the namespaces of tests."""
    words = [word.replace("penstock", "test-*") for word in rights(Role.WORKER, "penstock")]
    users.redis.execute_command("ACL", "SETUSER", "tester", "on", ">any", *words, *OF_TESTS)
    environment = os.environ | {"PENSTOCK_TEST_REDIS_URL": users.url_as("tester:any")}
    tests = ["test_states.py", "test_deaths.py", "test_input.py", "claims/test_waves.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not on_cluster"]
    command += [f"tests/integration/broker/{name}" for name in tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert [entry for entry in users.denied() if not entry["object"].startswith("client")] == []


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
    with redis.Redis.from_url(users.url(role)) as client, pytest.raises(NoPermissionError):
        client.execute_command(*command)


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.ops.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
