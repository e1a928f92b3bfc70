"""The entries of changes, where they cannot be written or hold what cannot be."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from penstock.shared.connection import CommandConnection
from penstock.shared.deployment import audit as audit_module
from penstock.shared.deployment.audit import Audit, acting_as, process_actor
from penstock.shared.errors import ValidationError
from penstock.shared.keys import Keys

from ...redis_server import RedisServer


async def test_a_full_redis_holds_up_no_change(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A purge is what helps there."""
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


async def test_the_error_of_a_change_is_told_and_not_that_of_its_entry(server: RedisServer) -> None:
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
