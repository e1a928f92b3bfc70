from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock.shared.broker import Broker
from penstock.shared.connection import CommandConnection

LONG_MS = 600_000


@pytest.fixture(autouse=True)
def _played_engines_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that a test plays says nothing between two lines of it, which a busy machine may keep far apart."""
    for call in (Broker.claim, Broker.renew):
        assert call.__kwdefaults__ is not None
        monkeypatch.setitem(call.__kwdefaults__, "lease_ttl_ms", LONG_MS)


@pytest.fixture
async def user_url(redis_url: str, namespace: str, commands: CommandConnection) -> AsyncIterator[str]:
    """URL for a user of Redis who has the name of the namespace, and all rights until a test takes some."""
    await commands.execute("ACL", "SETUSER", namespace, "on", ">pw", "~*", "&*", "+@all")
    yield redis_url.replace("://", f"://{namespace}:pw@")
    await commands.execute("ACL", "DELUSER", namespace)
