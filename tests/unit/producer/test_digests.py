"""Digests by which turns of a conversation are known to each other."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.producer.inputs.options import RequestOptions
from penstock.producer.inputs.prompt import build_request
from penstock.producer.requests.digests import MAX_ENDS, MIN_BYTES, Digests, conversation_digests
from penstock.shared.deployment.records import ModelCard
from penstock.shared.params.lora import LoRARequest

CARD = ModelCard(model="m")
LONG = "word " * MIN_BYTES
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


def digests(prompt: Any, **options: Any) -> Digests:
    return conversation_digests(build_request(prompt, None, card=CARD, options=RequestOptions(**options)))


def message(role: str, content: str | None = LONG, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def conversation(num_turns: int, answer: str = "a") -> list[dict[str, Any]]:
    """Return the conversation as its last turn sends it."""
    messages = [message("system"), message("user", "0" + LONG)]
    for number in range(1, num_turns):
        messages += [message("assistant", f"{answer}{number}"), message("user", f"{number}")]
    return messages


def test_a_turn_looks_up_earlier_turns_and_registers_its_own_digest() -> None:
    turns = [digests(conversation(number)) for number in range(1, 9)]
    for number, one in enumerate(turns):
        (own,) = one.own
        before = [turn.own[0] for turn in reversed(turns[max(0, number + 1 - MAX_ENDS) : number])]
        assert list(one.wanted) == [own, *before]


def test_the_form_of_an_answer_does_not_change_digests_of_earlier_turns() -> None:
    (first,) = digests(conversation(1)).own
    forms = [
        message("assistant", "as it was"),
        message("assistant", "without what it thought"),
        message("assistant", None, tool_calls=[CALL]),
    ]
    for form in forms:
        second = digests([*conversation(1), form, message("user", "next")])
        assert second.wanted[1:] == (first,)
        assert second.own != (first,)


def test_tool_results_are_skipped_in_the_lookup() -> None:
    (digest,) = digests(conversation(1)).own
    tools = [message("tool", f"{number}", tool_call_id="c") for number in range(10)]
    messages = [*conversation(1), message("assistant", None, tool_calls=[CALL] * 10), *tools]
    assert digests(messages).wanted[1:] == (digest,)


@pytest.mark.parametrize(
    "options",
    [
        {"tenant": "other"},
        {"cache_salt": "s"},
        {"lora_request": LoRARequest("adapter", 1, "/a")},
        {"chat_template_kwargs": {"tools": [{"type": "function"}]}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_changes_of_the_cache_key_change_all_digests(options: dict[str, Any]) -> None:
    assert not set(digests(conversation(3)).wanted) & set(digests(conversation(3), **options).wanted)
    if "chat_template_kwargs" not in options:
        assert digests("x", session_id="s").own != digests("x", session_id="s", **options).own


def test_prompts_that_differ_early_share_no_digest() -> None:
    other = [message("system", LONG + "!"), *conversation(3)[1:]]
    assert not set(digests(conversation(3)).wanted) & set(digests(other).wanted)


def test_short_prompts_have_no_digest() -> None:
    short = [message("user", "hello")]
    assert digests(short) == Digests()
    followed = digests([*short, message("assistant", "hello"), message("user")])
    assert len(followed.wanted) == 1


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3]], ids=str)
def test_plain_prompts_are_known_by_their_session_alone(prompt: Any) -> None:
    assert digests(prompt) == Digests()
    one = digests(prompt, session_id="s")
    assert one.wanted == one.own
    assert len(one.own) == 1
    assert one != digests(prompt, session_id="t")


def test_the_digest_of_a_resumable_request_is_last() -> None:
    request = build_request("x", None, card=CARD, options=RequestOptions(session_id="s"))
    (session,) = conversation_digests(request).own
    request.resumable = True
    first, last = conversation_digests(request).own
    assert first == session != last
    request.request_id = "other"
    assert conversation_digests(request).own[-1] != last


def test_the_session_is_looked_up_last() -> None:
    alone, of_session = digests(conversation(3)), digests(conversation(3), session_id="s")
    session = digests("x", session_id="s").own[0]
    assert of_session.wanted == (*alone.wanted, session)
    assert of_session.own == (*alone.own, session)
