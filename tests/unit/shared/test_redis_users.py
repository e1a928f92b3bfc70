"""Lines of an ACL file, as they are made; what Redis does with them is tested with a server."""

from __future__ import annotations

import hashlib

import pytest

from penstock.shared.keys import Keys
from penstock.shared.redis_access.needs import NEEDED, NEEDED_FOR_JOBS
from penstock.shared.redis_access.users import Role, rights, user_line


@pytest.mark.parametrize("role", Role)
def test_a_line_has_every_command_that_is_tried_and_no_password(role: Role) -> None:
    words = user_line(role, "penstock", "s3cret").split()
    assert words[:4] == ["user", role, "on", f"#{hashlib.sha256(b's3cret').hexdigest()}"]
    needed = NEEDED | NEEDED_FOR_JOBS if role is Role.JOBS else NEEDED
    assert {f"+{name.lower()}" for name in needed} <= {*words}
    # What is taken away first is not given again as a whole.
    assert [word for word in words if "@" in word] == ["-@all", "+@connection", "-@dangerous"]
    assert not {"+config", "+keys", "+flushall", "+acl", "+debug"} & {*words}


def test_only_operators_reach_what_is_theirs() -> None:
    keys = Keys("penstock")
    for role in Role:
        patterns = [word.removeprefix("~") for word in rights(role, "penstock") if word.startswith("~")]
        reaches_all = f"{keys.namespace}:*" in patterns
        assert reaches_all is (role is Role.OPERATOR)


def test_a_namespace_is_no_pattern() -> None:
    words = rights(Role.CLIENT, "a*b")
    assert "~a\\*b:models" in words
    assert "&a\\*b:*" in words
