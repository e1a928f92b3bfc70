"""The entries of changes, where they cannot be written or hold what cannot be."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from penstock.shared.connection import CommandConnection
from penstock.shared.deployment import audit as audit_module
from penstock.shared.deployment.audit import Audit
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
