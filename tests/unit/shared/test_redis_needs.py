"""Every command that a script or a call names is tried when a process connects."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from penstock.shared.redis_access.rights import NEEDED, NEEDED_FOR_MOVES, NEEDED_FOR_OPERATORS

ROOT = Path(__file__).parents[3]
CALLED_BY_SCRIPTS = re.compile(r"(?:redis\.p?call|attempt)\(\s*['\"]([A-Z]+)['\"]")
CALLED_BY_PYTHON = re.compile(r"(?:\bexecute|_send)\(\s*\"([A-Z]+)\"")
# Any user who is logged in may; subscribing is tried apart, since a transaction takes no subscription.
ALWAYS = {"PING", "SUBSCRIBE", "UNSUBSCRIBE"}
# Where it is forbidden, something is not known, and that is said.
OPTIONAL = {"ACL", "INFO", "SLOWLOG"}


def called() -> Iterator[tuple[str, Path]]:
    for folder in ("shared", "producer", "worker", "ops/cli", "ops/dashboard", "ops/views"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix not in (".py", ".lua"):
                continue
            for pattern in (CALLED_BY_SCRIPTS, CALLED_BY_PYTHON):
                yield from ((name, path) for name in pattern.findall(path.read_text()))


def test_all_commands_are_tried() -> None:
    calls = dict(called())
    assert len(calls) > 40
    listed = {*NEEDED, *NEEDED_FOR_MOVES, *NEEDED_FOR_OPERATORS, *ALWAYS, *OPTIONAL}
    assert {name: str(path) for name, path in calls.items() if name not in listed} == {}
    assert set(NEEDED) - set(calls) == set()
