"""Events of the log are names in snake_case, and ops/guide/reference/logs.md has all of them, with their fields."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .test_imports import PARTS, ROOT, sources

LEVELS = {"debug", "info", "warning", "error", "critical", "exception", "log"}
SNAKE_CASE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
# The name of a logger, everywhere: `log`, or one made of it by `bind`.
LOGGERS = {"log", "self._log"}
# Arguments that are no fields.
NO_FIELDS = {"exc_info"}
PAGE = ROOT / "ops" / "guide" / "reference" / "logs.md"


@dataclass
class Event:
    """The fields of all calls that log one event; ``is_open`` if some of its fields come from elsewhere."""

    levels: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)
    is_open: bool = False


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of a file that logs something. Each logger's name ends like this, wherever it is used."""
    text = path.read_text()
    return tuple(ast.walk(ast.parse(text))) if "log." in text or "get_logger" in text else ()


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """The calls of a file that log something, and their method."""
    for node in nodes_of(path):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in LEVELS and ast.unparse(node.func.value) in LOGGERS:
            yield node, node.func.attr


def makes_a_logger(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value).startswith(("structlog.get_logger", "get_logger("))


def name_of(call: ast.Call, method: str) -> str | None:
    """The event, if it stands in the call as a literal."""
    arguments = call.args[1:] if method == "log" else call.args
    if len(arguments) != 1 or not isinstance(arguments[0], ast.Constant):
        return None
    return str(arguments[0].value)


def fields_of(call: ast.Call) -> set[str]:
    """The fields that the call names; the standard library's loggers take them as ``extra``."""
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    extra = named.pop("extra", None)
    keys = extra.keys if isinstance(extra, ast.Dict) else []
    return {*named, *(ast.literal_eval(key) for key in keys if key is not None)} - NO_FIELDS


def levels_of(call: ast.Call, method: str) -> set[str]:
    if method == "log":
        return {word.lower() for word in re.findall(r"logging\.([A-Z]+)", ast.unparse(call.args[0]))} or {"?"}
    return {"error" if method == "exception" else method}


@functools.cache
def logged() -> dict[str, Event]:
    """Every event by its name."""
    events: dict[str, Event] = {}
    for part in PARTS:
        for path in sources(part):
            for call, method in calls(path):
                event = events.setdefault(str(name_of(call, method)), Event())
                event.levels |= levels_of(call, method)
                event.fields |= fields_of(call)
                event.is_open |= any(keyword.arg is None for keyword in call.keywords)
    return events


def documented() -> dict[str, tuple[set[str], set[str], str, str]]:
    """Levels, fields, meaning and advice of each row of the guide, by event."""
    rows = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len({row[0] for row in rows}) == len(rows), "an event has two rows"
    return {
        row[0].strip("`"): (set(row[1].split(", ")), set(re.findall(r"`(\w+)`", row[2])), row[3], row[4])
        for row in rows
    }


def test_every_event_is_a_name_in_snake_case() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{call.lineno} {ast.unparse(call)[:80]}"
        for part in PARTS
        for path in sources(part)
        for call, method in calls(path)
        if (name := name_of(call, method)) is None or not SNAKE_CASE.fullmatch(name)
    ]
    assert wrong == []
    assert len(logged()) > 80, "the loggers are called otherwise now"


def test_loggers_are_called_log_and_used_by_calls_alone() -> None:
    """Otherwise an event would not be found above."""
    wrong: list[str] = []
    for part in PARTS:
        for path in sources(part):
            nodes = [*nodes_of(path)]
            called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
            for node in nodes:
                if isinstance(node, ast.Assign) and makes_a_logger(node.value):
                    wrong += [f"{path}:{node.lineno}" for name in node.targets if ast.unparse(name) not in LOGGERS]
                if isinstance(node, ast.Attribute) and node.attr in LEVELS and id(node) not in called:
                    wrong += [f"{path}:{node.lineno}"] * (ast.unparse(node.value) in LOGGERS)
    assert wrong == []


def test_the_guide_has_every_event_and_no_other() -> None:
    assert documented().keys() ^ logged().keys() == set()


def test_the_guide_lists_the_fields_of_events() -> None:
    for name, (levels, fields, meaning, advice) in documented().items():
        event = logged()[name]
        assert levels == event.levels, name
        assert event.fields <= fields, name
        assert event.is_open or fields == event.fields, name
        assert meaning, name
        assert advice, name
