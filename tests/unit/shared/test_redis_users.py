"""Lines of an ACL file, as they are made; other tests try them with a server."""

from __future__ import annotations

import hashlib

import pytest

from penstock.shared.keys import Keys
from penstock.shared.redis_access.rights import NEEDED, NEEDED_FOR_JOBS, RedisVersion, Role, rights, user_line


@pytest.mark.parametrize("version", RedisVersion)
@pytest.mark.parametrize("role", Role)
def test_a_line_has_every_command_that_is_tried_and_no_password(role: Role, version: RedisVersion) -> None:
    line = user_line(role, "penstock", "s3cret", version)
    assert line.split()[:4] == ["user", role, "on", f"#{hashlib.sha256(b's3cret').hexdigest()}"]
    # Selectors are about some keys alone, and come last.
    words = line.partition(" (")[0].split()
    needed = NEEDED | NEEDED_FOR_JOBS if role is Role.JOBS else NEEDED
    assert {f"+{name.lower()}" for name in needed} - {*words} == {"+pubsub"}
    assert "+pubsub|numsub" in words
    # Rights that are removed first are not given again as a whole.
    assert [word for word in words if "@" in word] == ["-@all", "+@connection", "-@dangerous"]
    assert not {"+config", "+keys", "+flushall", "+acl", "+debug"} & {*words}


def test_only_operators_reach_their_keys() -> None:
    keys = Keys("penstock")
    for role in Role:
        patterns = [word.removeprefix("~") for word in rights(role, "penstock") if word.startswith("~")]
        reaches_all = f"{keys.namespace}:*" in patterns
        assert reaches_all is (role is Role.OPERATOR)


@pytest.mark.parametrize("version", RedisVersion)
def test_a_namespace_is_no_pattern(version: RedisVersion) -> None:
    words = rights(Role.CLIENT, "a*b", version)
    assert "~a\\*b:engines" in words
    assert "&a\\*b:{*" in words
    assert not [word for word in words if "a*b" in word]


def test_redis_6_2_gets_no_words_that_it_does_not_know() -> None:
    for role in Role:
        words = rights(role, "penstock", RedisVersion.V6_2)
        assert not [word for word in words if word[0] in "%("]
        assert any(word[0] in "%(" for word in rights(role, "penstock")) is (role is not Role.OPERATOR)
