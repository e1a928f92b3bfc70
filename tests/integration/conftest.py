from __future__ import annotations

import pytest

from penstock.shared.broker import Broker

LONG_MS = 600_000


@pytest.fixture(autouse=True)
def _played_engines_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that a test plays says nothing between two lines of it, which a busy machine may keep far apart."""
    for call in (Broker.claim, Broker.renew):
        assert call.__kwdefaults__ is not None
        monkeypatch.setitem(call.__kwdefaults__, "lease_ttl_ms", LONG_MS)
