"""Text and parts in the contents of messages, under templates that take the one, the other, or both."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.errors import UnsupportedParameterError, ValidationError
from penstock.worker.text.chat_template import ChatTemplate

PARTS = [{"type": "text", "text": "look"}, {"type": "input_text", "text": "there"}]
ROLES = "{% for m in messages %}[{{ m.role }}]"
CONCATENATED = ROLES + "{{ m.content + '|' }}{% endfor %}"
WRITTEN = ROLES + "{{ m.content | trim }}|{% endfor %}"
# As vision models have it: text as it is, or part by part.
BOTH = (
    ROLES
    + """\
{%- if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}
{%- if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}{% endfor %}
{%- endif %}|{% endfor %}"""
)
ONLY_PARTS = ROLES + "{% for part in m.content %}{{ part.text }}{% endfor %}|{% endfor %}"
# As Llama 3.2 Vision: a system message is text, whatever a user's is.
BY_ROLE = "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}|{% endif %}" + BOTH


def render(source: str, content: Any, role: str = "user") -> str:
    messages = [{"role": role, "content": content}]
    if role != "user":
        messages.insert(len(messages) * (role == "system"), {"role": "user", "content": "hi"})
    return ChatTemplate(source, {}).render(messages, {})


@pytest.mark.parametrize(
    ("source", "text", "parts"),
    [
        (CONCATENATED, "[user]look|", "[user]look\nthere|"),
        (WRITTEN, "[user]look|", "[user]look\nthere|"),
        (BOTH, "[user]look|", "[user]lookthere|"),
        (ONLY_PARTS, "[user]look|", "[user]lookthere|"),
    ],
    ids=["concatenated", "written", "both", "only parts"],
)
def test_content_has_the_form_that_the_template_iterates(source: str, text: str, parts: str) -> None:
    assert render(source, "look") == text
    assert render(source, PARTS[:1]) == text
    assert render(source, PARTS) == parts


def test_each_role_has_its_own_form() -> None:
    assert render(BY_ROLE, PARTS, "system").startswith("look\nthere|")
    assert "type" not in render(BY_ROLE, PARTS, "system")
    assert render(BY_ROLE, PARTS) == "[user]lookthere|"
    assert render(CONCATENATED, PARTS, "assistant") == "[user]hi|[assistant]look\nthere|"
    assert render(CONCATENATED, PARTS, "tool").endswith("[tool]look\nthere|")


def test_a_template_that_refuses_the_probe_is_taken_to_want_text() -> None:
    source = "{% if messages | length < 3 %}{{ raise_exception('too few') }}{% endif %}" + WRITTEN
    messages = [{"role": role, "content": PARTS} for role in ("user", "assistant", "user")]
    assert ChatTemplate(source, {}).render(messages, {}).count("look\nthere|") == 3


def test_a_tool_result_may_be_data() -> None:
    source = ROLES + "{{ m.content if m.content is string else m.content | tojson }}|{% endfor %}"
    assert render(source, {"warm": True}, "tool").endswith('[tool]{"warm": true}|')
    assert render(source, [1, 2], "tool").endswith("[tool][1, 2]|")


@pytest.mark.parametrize("source", [CONCATENATED, WRITTEN, BOTH, ONLY_PARTS])
def test_a_part_that_is_no_text_is_refused_by_name(source: str) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(UnsupportedParameterError, match=r"^messages\[0\]\.content\[1\]\.type 'image_url'"):
        render(source, [PARTS[0], image])
    with pytest.raises(ValidationError, match=r"^messages\[0\]\.content must be text"):
        render(source, 5)
