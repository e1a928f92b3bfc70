"""Risks that a server's INFO shows."""

from __future__ import annotations

import pytest

from penstock.shared.redis_access.check import risks_of

GOOD = {"aof_enabled": "1", "aof_last_write_status": "ok", "role": "master", "maxmemory": "0", "used_memory": "9"}


@pytest.mark.parametrize(
    ("changed", "code", "message"),
    [
        ({"aof_enabled": "0"}, "redis_not_persistent", "or everything if it makes none"),
        ({"aof_last_write_status": "err"}, "redis_cannot_write", "refuses writes"),
        ({"maxmemory": "100", "maxmemory_policy": "allkeys-lru"}, "redis_evicts", "would lose requests"),
        ({"maxmemory": "100", "maxmemory_policy": "volatile-lru"}, "redis_evicts", "no request that waits or runs"),
        ({"maxmemory": "100", "used_memory": "81"}, "redis_nearly_full", "uses 81% of its memory"),
        ({"role": "slave"}, "redis_is_replica", "is lost"),
    ],
)
def test_each_risk_is_reported_with_its_remedy(changed: dict[str, str], code: str, message: str) -> None:
    (risk,) = risks_of(GOOD | changed, "redis://host")
    assert risk.code == code
    assert risk.message.startswith("Redis at redis://host ")
    assert message in risk.message
    assert risk.remedy


@pytest.mark.parametrize(
    "info",
    [
        GOOD,
        {},
        GOOD | {"maxmemory": "100", "used_memory": "80", "maxmemory_policy": "noeviction"},
        GOOD | {"maxmemory_policy": "allkeys-lru"},
    ],
)
def test_good_and_unknown_settings_are_no_risk(info: dict[str, str]) -> None:
    assert risks_of(info, "redis://host") == []


@pytest.mark.parametrize(("makes_copies", "message"), [(True, "since its last copy, which"), (False, "every request")])
def test_the_loss_of_a_crash_is_stated_if_known(makes_copies: bool, message: str) -> None:
    (risk,) = risks_of(GOOD | {"aof_enabled": "0"}, "redis://host", makes_copies=makes_copies)
    assert message in risk.message
