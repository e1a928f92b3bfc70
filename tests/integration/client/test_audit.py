"""The entries of changes, where they cannot be written or hold what cannot be."""

from __future__ import annotations

import asyncio
import os
import pwd
import subprocess
import sys

import pytest
from structlog.testing import capture_logs

from penstock.shared.connection import CommandConnection
from penstock.shared.deployment import audit as audit_module
from penstock.shared.deployment.audit import Actor, ActorSource, Audit, acting_as, process_actor
from penstock.shared.errors import ValidationError
from penstock.shared.keys import Keys
from penstock.shared.redis_access.rights import Role, rights

from ...redis_server import RedisServer, acl_version


async def test_a_full_redis_holds_up_no_change(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A purge is the remedy there."""
    monkeypatch.setattr(audit_module, "PATIENCE_S", 0.2)
    commands = CommandConnection(server.url)
    await commands.execute("CONFIG", "SET", "maxmemory", 1)
    done = []
    with capture_logs() as logs:
        async with Audit(commands, Keys()).audited("queue.purge", "m"):
            done.append("purged")
    assert done == ["purged"]
    assert [line["result"] for line in logs if line["event"] == "audit_not_written"] == ["ok"]
    await commands.close()


async def test_the_error_of_a_change_is_raised_instead_of_that_of_its_audit_entry(server: RedisServer) -> None:
    """Text that is no text is refused by name, and noted."""
    commands = CommandConnection(server.url)
    audit = Audit(commands, Keys())
    with pytest.raises(ValidationError, match="tenant"):
        async with audit.audited("queue.configure_tenant", "m\ud800", tenant="hi\ud800"):
            raise ValidationError("tenant must hold no surrogates")
    (entry,) = await audit.read()
    assert (entry.target, entry.details, entry.result) == ("m?", {"tenant": "hi?"}, "validation_error")
    await commands.close()


async def test_operators_and_apps_write_apart_and_are_read_together(
    commands: CommandConnection, namespace: str
) -> None:
    """Page by page, too, where an operator and an app have acted in the same millisecond."""
    keys = Keys(namespace)
    audit = Audit(commands, keys)
    for number in range(6):
        with acting_as(process_actor("cli" if number % 2 else "client")):
            async with audit.audited(f"test.{number}"):
                pass
    assert await commands.execute("XLEN", keys.audit()) == await commands.execute("XLEN", keys.audit_of_apps()) == 3
    assert sorted(entry.action for entry in await audit.read()) == [f"test.{number}" for number in range(6)]
    record = (await commands.execute("XREVRANGE", keys.audit(), "+", "-", "COUNT", 1))[0][1][1]
    for key in (keys.audit(), keys.audit_of_apps()):
        await commands.execute("XADD", key, "9999999999999-0", "entry", record)
    pages, before = [], ""
    while page := await audit.read(limit=1, before=before):
        pages.append(len(page))
        before = page[-1].entry_id
    assert sum(pages) == 8
    assert pages[0] == 2


SCRIPT = """
import asyncio, sys
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.audit import Audit
from penstock.shared.keys import Keys

async def main():
    connection = CommandConnection(sys.argv[1])
    async with Audit(connection, Keys()).audited("queue.pause", "m"):
        pass
    await connection.close()

asyncio.run(main())
"""


async def test_the_actor_is_not_read_from_the_environment(server: RedisServer) -> None:
    environment = {**os.environ, "USER": "mallory", "LOGNAME": "mallory", "SUDO_USER": "mallory", "USERNAME": "mallory"}
    command = [sys.executable, "-c", SCRIPT, server.url]
    await asyncio.to_thread(subprocess.run, command, env=environment, check=True)
    commands = CommandConnection(server.url)
    (entry,) = await Audit(commands, Keys()).read()
    assert entry.actor == pwd.getpwuid(os.getuid()).pw_name
    assert (entry.source, entry.redis_user) == ("process user", "default")
    await commands.close()


@pytest.mark.parametrize("role", [Role.CLIENT, Role.OPERATOR])
async def test_the_redis_user_is_reported_by_the_server(server: RedisServer, role: Role) -> None:
    words = rights(role, "penstock", await asyncio.to_thread(acl_version))
    await asyncio.to_thread(server.execute, "ACL", "SETUSER", "ann", "on", ">pw", *words)
    commands, reader = CommandConnection(server.url.replace("unix://", "unix://ann:pw@")), CommandConnection(server.url)
    with acting_as(Actor(name="olga", via="app")):
        async with Audit(commands, Keys()).audited("queue.pause", "m"):
            pass
    (entry,) = await Audit(reader, Keys()).read()
    assert (entry.actor, entry.source, entry.redis_user) == ("olga", ActorSource.APP, "ann")
    # Redis 6.2 also denies these users to name their connections.
    denied = {part for line in await reader.execute("ACL", "LOG") for part in line if isinstance(part, bytes)}
    assert not {part for part in denied if part.startswith(b"acl")}
    await commands.close()
    await reader.close()


async def test_a_server_that_does_not_report_users_still_gets_an_entry(server: RedisServer) -> None:
    version = await asyncio.to_thread(acl_version)
    old = [word for word in rights(Role.CLIENT, "penstock", version) if word != "+acl|whoami"]
    await asyncio.to_thread(server.execute, "ACL", "SETUSER", "old", "on", ">pw", *old)
    commands, reader = CommandConnection(server.url.replace("unix://", "unix://old:pw@")), CommandConnection(server.url)
    async with Audit(commands, Keys()).audited("queue.pause", "m"):
        pass
    (entry,) = await Audit(reader, Keys()).read()
    assert (entry.action, entry.redis_user) == ("queue.pause", "")
    await commands.close()
    await reader.close()
