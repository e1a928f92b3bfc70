"""System and developer messages at every place of a chat, under templates that render, refuse, move or drop them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.worker.text.chat_template import ChatTemplate
from penstock.worker.text.message_roles import RoleSupport

LOOP = "{% for m in messages %}"
TURN = "<{{ m.role }}>{{ m.content }}|"
REFUSE = "{{ raise_exception('System message must be at the beginning.') }}"
ANY_ROLE = LOOP + TURN + "{% endfor %}"
# As Qwen 3.5.
ONLY_FIRST = LOOP + "{% if m.role == 'system' and not loop.first %}" + REFUSE + "{% endif %}" + TURN + "{% endfor %}"
# As gpt-oss: only the first message may be one of the system; the loop has no branch for others.
DROPS_LATER = (
    "{% if messages[0].role in ('system', 'developer') %}<developer>{{ messages[0].content }}|{% endif %}"
    + LOOP
    + "{% if m.role in ('user', 'assistant', 'tool') %}"
    + TURN
    + "{% endif %}{% endfor %}"
)
# As Gemma 2, which also refuses two messages of the user in a row.
NO_SYSTEM = (
    LOOP
    + "{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    + REFUSE
    + "{% endif %}"
    + TURN
    + "{% endfor %}"
)
# As Mistral 7B: the system message becomes part of the last message of the user.
MOVES = (
    "{% if messages[0].role == 'system' %}{% set system, messages = messages[0].content, messages[1:] %}{% endif %}"
    + LOOP
    + "{% if loop.last and system %}{{ system }}{% endif %}"
    + TURN
    + "{% endfor %}"
)
NO_BRANCH = LOOP + "{% if m.role == 'user' %}[u]{% else %}[a]{% endif %}{{ m.content }}{% endfor %}"
DEVELOPER = (
    LOOP
    + "{% if m.role == 'developer' %}<dev>{{ m.content }}|{% elif m.role == 'system' and not loop.first %}"
    + REFUSE
    + "{% else %}"
    + TURN
    + "{% endif %}{% endfor %}"
)
ONLY_PARTS = LOOP + "<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}|{% endfor %}"


def chat(*turns: str) -> list[dict[str, Any]]:
    """Return a chat of turns such as ``user: hi``."""
    return [dict(zip(("role", "content"), turn.split(": "), strict=True)) for turn in turns]


def render(source: str, *turns: str) -> str:
    return ChatTemplate(source, {}).render(chat(*turns), {})


@pytest.mark.parametrize(
    ("source", "support"),
    [
        (ANY_ROLE, RoleSupport(True, True, False)),
        (ONLY_FIRST, RoleSupport(True, False, False)),
        (DROPS_LATER, RoleSupport(True, False, False)),
        (NO_SYSTEM, RoleSupport(False, False, False)),
        (MOVES, RoleSupport(True, False, False)),
        (NO_BRANCH, RoleSupport(True, False, False)),
        (DEVELOPER, RoleSupport(True, False, True)),
        (ONLY_PARTS, RoleSupport(True, True, False)),
        ("{{ 1 / 0 }}", RoleSupport()),
        ("{{ messages[-1].content }}", RoleSupport()),
    ],
    ids=[
        "any role",
        "only first",
        "drops",
        "no system",
        "moves",
        "no branch",
        "developer",
        "only parts",
        "broken",
        "last message",
    ],
)
def test_places_of_instructions_follow_from_rendered_probes(source: str, support: RoleSupport) -> None:
    assert ChatTemplate(source, {}).roles == support


def test_a_template_that_renders_them_gets_instructions_unchanged() -> None:
    turns = ["system: a", "system: b", "user: c", "system: d", "user: e"]
    assert render(ANY_ROLE, *turns) == "<system>a|<system>b|<user>c|<system>d|<user>e|"
    assert render(ANY_ROLE, "user: a", "developer: b") == "<user>a|<system>b|"
    assert render(DEVELOPER, "system: a", "user: b", "developer: c") == "<system>a|<user>b|<dev>c|"


@pytest.mark.parametrize("source", [ONLY_FIRST, DEVELOPER])
def test_later_instructions_are_text_of_the_user_at_their_place(source: str) -> None:
    assert render(source, "system: a", "system: b", "user: c") == "<system>a\n\nb|<user>c|"
    assert (
        render(source, "system: a", "user: b", "assistant: c", "system: d", "user: e", "assistant: f")
        == "<system>a|<user>b|<assistant>c|<user><system-reminder>d</system-reminder>\n\ne|<assistant>f|"
    )
    assert render(source, "user: a", "system: b") == "<user>a\n\n<system-reminder>b</system-reminder>|"


def test_instructions_join_their_neighbours_if_turns_must_alternate() -> None:
    a, c = "<system-reminder>a</system-reminder>", "<system-reminder>c</system-reminder>"
    turns = ["system: a", "user: b", "developer: c", "user: d", "assistant: e", "user: f"]
    assert render(NO_SYSTEM, *turns) == f"<user>{a}\n\nb\n\n{c}\n\nd|<assistant>e|<user>f|"
    assert render(NO_SYSTEM, "user: a", "system: ", "assistant: b") == "<user>a|<assistant>b|"


def test_two_messages_of_the_user_stay_two_without_instructions_between() -> None:
    turns = ["user: a", "user: b", "assistant: c", "system: d", "assistant: e", "user: f", "user: g"]
    reminder = "<system-reminder>d</system-reminder>"
    assert render(ONLY_FIRST, *turns) == f"<user>a|<user>b|<assistant>c|<user>{reminder}|<assistant>e|<user>f|<user>g|"


def test_parts_of_instructions_stay_parts() -> None:
    parts = [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]
    messages = [*chat("user: a", "assistant: b"), {"role": "system", "content": parts}, *chat("user: e")]
    rendered = ChatTemplate(ONLY_FIRST, {}).render(messages, {})
    assert rendered == "<user>a|<assistant>b|<user><system-reminder>\nc\nd\n</system-reminder>\ne|"


@pytest.mark.parametrize("source", [ANY_ROLE, ONLY_FIRST, DROPS_LATER, DEVELOPER, ONLY_PARTS])
def test_a_chat_that_grows_by_a_reply_keeps_its_prefix(source: str) -> None:
    turns = ["system: a", "user: b", "system: c", "assistant: d", "tool: e", "developer: f", "assistant: g"]
    shorter = ""
    for i in (3, 4, 6, 7):
        longer = render(source, *turns[:i])
        assert longer.startswith(shorter)
        shorter = longer
