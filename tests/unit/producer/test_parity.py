"""The methods that are there: blocking ones for asynchronous ones, and those of which the guide speaks."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from penstock.producer import LLM, Client, RequestHandle

PAGE = Path(__file__).parents[3] / "ops" / "guide" / "migrating" / "client.md"
# Their results are asynchronous themselves, or they are about the connection.
# The blocking `encode` takes many prompts itself.
ASYNCHRONOUS_ALONE = {"open", "submit", "submit_many", "handle", "cancel", "encode_all"}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_the_blocking_client_has_all_methods_of_the_client() -> None:
    coroutines = {name for name in public(Client) if inspect.iscoroutinefunction(getattr(Client, name))}
    assert coroutines - public(LLM) == ASYNCHRONOUS_ALONE
    properties = {name for name in public(Client) if isinstance(inspect.getattr_static(Client, name), property)}
    assert properties <= public(LLM)
    assert inspect.signature(LLM.sleep) == inspect.signature(Client.sleep)


def test_the_guides_table_lists_existing_methods() -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    kinds = {"client": Client, "llm": LLM, "handle": RequestHandle}
    named = [pair for row in rows for pair in re.findall(r"`(client|llm|handle)\.(\w+)", row[1])]
    assert len(rows) > 40
    assert len(named) > 40
    for owner, name in named:
        assert name in public(kinds[owner]), f"{owner}.{name}"
