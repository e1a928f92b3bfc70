"""Users of Redis with the rights that `penstock redis users` gives them may do what they need, and nothing else.

The tests of the compose file (``tests/e2e/deploy``) check that each process can do its part with them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from redis.exceptions import NoPermissionError, RedisError

from penstock.producer import Client
from penstock.producer.webhooks.events import WebhookSecret
from penstock.producer.webhooks.secrets import SecretStore, new_secret
from penstock.producer.webhooks.targets import WebhookTargets
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.audit import Audit
from penstock.shared.deployment.records import ModelCard
from penstock.shared.errors import ValidationError
from penstock.shared.keys import Keys, channel_in
from penstock.shared.redis_access.rights import RedisVersion, Role, rights

from ..processes import DEADLINE_S
from ..redis_server import RedisServer, acl_version
from ..warm_python import light_python

# One server for all.
pytestmark = pytest.mark.xdist_group("redis_users")

ROOT = Path(__file__).parents[2]
KEYS = Keys()
# Commands of the broker's tests themselves, which no process of ours runs.
OF_TESTS = ["+scan", "+keys", "+object", "+debug", "+config", "+script", "+client", "+xinfo", "+acl", "+flushdb"]


class Users:
    """A Redis on which only these users have rights, and the commands that it denied them.

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
        """Return the commands denied since the last call."""
        entries: Any = self.redis.acl_log(count=1000)
        self.redis.acl_log_reset()
        return [{name: entry[name] for name in ("username", "reason", "context", "object")} for entry in entries]


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Users]:
    secrets = tmp_path_factory.mktemp("made") / "secrets"
    result = run_command("redis", "users", str(secrets), "--redis-version", acl_version())
    assert result.returncode == 0, result.stderr
    acl = secrets / "users.acl"
    # A user that may read the denied commands.
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
    words = [word.replace("penstock", "test-*") for word in rights(Role.WORKER, "penstock", acl_version())]
    users.redis.execute_command("ACL", "SETUSER", "tester", "on", ">any", *words, *OF_TESTS)
    environment = os.environ | {"PENSTOCK_TEST_REDIS_URL": users.url_as("tester:any")}
    tests = ["test_states.py", "test_deaths.py", "test_input.py", "claims/test_waves.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not on_cluster"]
    command += [f"tests/integration/broker/{name}" for name in tests]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:]
    assert [entry for entry in users.denied() if not entry["object"].startswith("client")] == []


MODEL = KEYS.model("m")
# By kind of key: the command that a role is tried with, to read it, to change it and to remove it.
STRING = (("GET",), ("SET", "x"), ("DEL",))
HASH = (("HGETALL",), ("HSET", "f", "x"), ("HDEL", "f"), ("DEL",))
SET = (("SMEMBERS",), ("SADD", "x"), ("DEL",))
STREAM = (
    ("XRANGE", "-", "+"),
    ("XADD", "*", "f", "x"),
    ("XADD", "MAXLEN", "0", "*", "f", "x"),
    ("XTRIM", "MAXLEN", "0"),
    ("DEL",),
)
ALL, READS, NOTHING = "all", "reads", "nothing"
# By key: the rights of clients, workers, gateways and jobs. Operators may do everything.
REACH = {
    MODEL.request("r"): (HASH, ALL, ALL, ALL, ALL),
    KEYS.models(): (HASH, READS, ALL, READS, READS),
    KEYS.awaited_models(): (HASH, ALL, ALL, ALL, ALL),
    KEYS.budgets(): (HASH, NOTHING, READS, NOTHING, READS),
    KEYS.budgets_ended(): (STRING, NOTHING, ALL, NOTHING, NOTHING),
    KEYS.budgets_synced(): (STRING, NOTHING, ALL, NOTHING, NOTHING),
    KEYS.forgotten_models(): (SET, NOTHING, READS, READS, READS),
    KEYS.layouts(): (HASH, READS, READS, READS, READS),
    KEYS.placements(): (HASH, ALL, ALL, ALL, ALL),
    KEYS.moves(): (HASH, NOTHING, NOTHING, NOTHING, NOTHING),
    KEYS.engines(): (SET, ALL, ALL, ALL, ALL),
    KEYS.engine("e"): (STRING, READS, ALL, READS, READS),
    KEYS.processes(): (SET, NOTHING, ALL, ALL, ALL),
    KEYS.process("p"): (STRING, NOTHING, ALL, ALL, ALL),
    KEYS.adapters(): (HASH, ALL, READS, ALL, ALL),
    KEYS.api_keys(): (HASH, NOTHING, NOTHING, READS, NOTHING),
    KEYS.operator_keys(): (HASH, NOTHING, NOTHING, NOTHING, NOTHING),
    KEYS.dashboard_secret(): (STRING, NOTHING, NOTHING, NOTHING, NOTHING),
    KEYS.audit(): (STREAM, NOTHING, NOTHING, NOTHING, NOTHING),
    KEYS.audit_of_apps(): (STREAM, {"XADD"}, NOTHING, {"XADD"}, NOTHING),
    KEYS.webhook_secrets(): (HASH, NOTHING, NOTHING, NOTHING, ALL),
    KEYS.webhooks_signed(): (SET, READS, NOTHING, READS, ALL),
    KEYS.webhook_networks(): (STRING, READS, NOTHING, READS, ALL),
    KEYS.webhook_models(): (SET, {"SADD"}, NOTHING, {"SMEMBERS", "SADD"}, ALL),
    KEYS.webhook_event("e"): (STRING, NOTHING, NOTHING, NOTHING, ALL),
    KEYS.webhook_outbox(): (STREAM, NOTHING, NOTHING, ALL, ALL),
    KEYS.jobs_due(): (SET, NOTHING, NOTHING, ALL, ALL),
    KEYS.response("t", "r"): (STRING, NOTHING, NOTHING, ALL, NOTHING),
    KEYS.batches().batch("b"): (HASH, ALL, NOTHING, ALL, ALL),
}
ROLES = (Role.CLIENT, Role.WORKER, Role.GATEWAY, Role.JOBS)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("key", REACH)
def test_allowed_commands_of_a_role(users: Users, role: Role, key: str) -> None:
    """Each command by itself. Redis 6.2 knows no keys that can only be read, or only be added to."""
    commands, *reaches = REACH[key]
    reach = reaches[ROLES.index(role)]
    with redis.Redis.from_url(users.url(role)) as client:
        for position, (name, *rest) in enumerate(commands):
            if acl_version() is RedisVersion.V6_2:
                may = reach != NOTHING
            else:
                may = reach == ALL or (reach == READS and position == 0) or name in reach
            assert is_permitted(client, name, key, *rest) is may, name


def is_permitted(client: redis.Redis, *command: str) -> bool:
    """Whether Redis puts it in line; nothing is run."""
    pipeline = client.pipeline(transaction=True)
    pipeline.execute_command(*command)
    pipeline.execute_command("FLUSHALL")  # no user may, so the transaction is thrown away
    with pytest.raises(RedisError) as caught:
        pipeline.execute()
    return "FLUSHALL" in str(caught.value) or "flushall" in str(caught.value)


@pytest.mark.parametrize("database", [0, 3])
@pytest.mark.parametrize("role", Role)
def test_which_channels_a_role_may_use(users: Users, role: Role, database: int) -> None:
    """Operators send commands to supervisors, and workers hear them. No role hears other namespaces."""
    models, workers = ({role}, {Role.WORKER, Role.OPERATOR})
    for channel, allowed in (
        (MODEL.wake, models),
        (KEYS.worker_commands("w"), workers),
        ("other:{m}:wake", set[str]()),
    ):
        name = channel_in(database, channel)
        with redis.Redis.from_url(users.url(role)) as client:
            assert is_permitted(client, "PUBLISH", name, "x") is (role in allowed), name
            subscription = client.pubsub()
            if role in allowed:
                subscription.subscribe(name)
                assert subscription.get_message(timeout=DEADLINE_S)
            else:
                subscription.subscribe(name)
                with pytest.raises(NoPermissionError):
                    subscription.get_message(timeout=DEADLINE_S)
            subscription.close()


@pytest.mark.parametrize(
    ("role", "command"),
    [
        *((role, ("GET", "somebody:elses")) for role in Role),
        *(
            (role, command)
            for role in Role
            for command in (
                ("FLUSHALL",),
                ("FLUSHDB",),
                ("KEYS", "*"),
                ("CONFIG", "GET", "*"),
                ("ACL", "LIST"),
                ("CLIENT", "LIST"),
                ("CLIENT", "KILL", "TYPE", "normal"),
                ("PUBSUB", "CHANNELS"),
                ("MONITOR",),
                ("SCRIPT", "FLUSH"),
                ("SWAPDB", "0", "1"),
                ("SHUTDOWN",),
            )
        ),
    ],
)
def test_forbidden_commands_of_a_role(users: Users, role: Role, command: tuple[str, ...]) -> None:
    with redis.Redis.from_url(users.url(role)) as client, pytest.raises(NoPermissionError):
        client.execute_command(*command)


async def test_an_app_asks_for_webhooks_and_acts_without_reading_secrets(users: Users) -> None:
    """With secrets of a version that kept no index of them, too."""
    operator, jobs = (CommandConnection(users.url(role)) for role in (Role.OPERATOR, Role.JOBS))
    try:
        card = ModelCard(model="hooked", max_model_len=100, vocab_size=50, registered_at=1.0)
        await operator.execute("HSET", KEYS.models(), "hooked", msgspec.json.encode(card))
        old = WebhookSecret(tenant="old", current=new_secret(), created_at=1.0)
        await operator.execute("HSET", KEYS.webhook_secrets(), '["old",""]', msgspec.json.encode(old))
        await WebhookTargets(jobs, KEYS).publish(())
        await SecretStore(operator, KEYS).create("new")
        assert (await SecretStore(jobs, KEYS).find("old", "https://example.org/")) == old
        users.denied()
        async with Client.connect(users.url(Role.CLIENT), model="hooked") as client:
            for tenant in ("old", "new"):
                await client.submit("hi", tenant=tenant, webhook_url="https://example.org/")
            with pytest.raises(ValidationError, match="tenant 'none' has no webhook secret"):
                await client.submit("hi", tenant="none", webhook_url="https://example.org/")
            await client.pause_generation()
            await client.resume_generation()
        await SecretStore(operator, KEYS).delete("new")
        async with Client.connect(users.url(Role.CLIENT), model="hooked") as client:
            with pytest.raises(ValidationError, match="tenant 'new' has no webhook secret"):
                await client.submit("hi", tenant="new", webhook_url="https://example.org/")
        assert {entry.action for entry in await Audit(operator, KEYS).read(limit=2)} == {"queue.resume", "queue.pause"}
        # Redis 6.2 lets no user name a connection.
        assert [entry for entry in users.denied() if not entry["object"].startswith("client")] == []
    finally:
        await operator.close()
        await jobs.close()


async def test_an_app_with_a_user_of_an_older_acl_file_still_works(users: Users) -> None:
    """It may read the secrets and write to the operators' audit, and knows neither index nor stream of today."""
    patterns = ["old-version:{*", *(f"old-version:{name}" for name in ("models", "layouts", "placements", "engines"))]
    patterns += [f"old-version:{name}" for name in ("absent", "engine:*", "adapters:{old-version}:*", "audit")]
    patterns += [f"old-version:webhooks:{name}" for name in ("models", "networks", "secrets")]
    commands = [word for word in rights(Role.CLIENT, "old-version", RedisVersion.V6_2) if word[0] in "+-"]
    words = ["on", ">any", "resetchannels", "&old-version:*", *(f"~{pattern}" for pattern in patterns), *commands]
    users.redis.execute_command("ACL", "SETUSER", "app", *words)
    keys, judge = Keys("old-version"), CommandConnection(users.url_as("judge:any"))
    try:
        card = ModelCard(model="m", max_model_len=100, vocab_size=50, registered_at=1.0)
        await judge.execute("HSET", keys.models(), "m", msgspec.json.encode(card))
        secret = WebhookSecret(tenant="default", current=new_secret(), created_at=1.0)
        await judge.execute("HSET", keys.webhook_secrets(), '["default",""]', msgspec.json.encode(secret))
        async with Client.connect(users.url_as("app:any"), model="m", namespace=keys.namespace) as client:
            await client.submit("hi", webhook_url="https://example.org/")
            await client.pause_generation()
        assert [entry.action for entry in await Audit(judge, keys).read()] == ["queue.pause"]
    finally:
        await judge.close()


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [light_python(), "-m", "penstock.ops.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
