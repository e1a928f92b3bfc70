from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.errors import ModelLoadError, ValidationError
from penstock.worker.text.chat_template import ChatTemplate
from penstock.worker.text.tokenizer import TextCodec

TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}
        {{- raise_exception('no role ' ~ message.role) }}
    {%- endif %}
{{ bos_token }}[{{ message.role }}] {{ message.content }}
{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""


def render(messages: list[dict[str, Any]], **kwargs: Any) -> str:
    return ChatTemplate(TEMPLATE, {"bos_token": "<s>"}).render(messages, kwargs)


def test_special_tokens_and_generation_prompt_match_transformers() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert render(messages).strip() == "<s>[user] hi\n[assistant]"
    assert "[assistant]" not in render(messages, add_generation_prompt=False)


@pytest.mark.slow
def test_the_rendering_is_the_one_of_transformers() -> None:
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    expected = transformers.render_jinja_template(
        conversations=[messages], chat_template=TEMPLATE, add_generation_prompt=True, bos_token="<s>"
    )[0]
    assert render(messages) == (expected[0] if isinstance(expected, list) else expected)


def test_a_template_that_refuses_is_the_callers_error() -> None:
    with pytest.raises(ValidationError, match="no role tool"):
        render([{"role": "tool", "content": ""}])


def test_a_template_cannot_reach_python() -> None:
    with pytest.raises(ValidationError, match="refuses"):
        ChatTemplate("{{ messages.__class__.__mro__ }}", {}).render([], {})


def test_missing_files_of_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"lacks tokenizer\.json"):
        TextCodec.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read"):
        TextCodec.load(tmp_path)


def test_a_model_without_a_template_is_refused(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((demo_model / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    codec = TextCodec.load(tmp_path)
    assert codec.encode("spell 7:")
    with pytest.raises(ValidationError, match="no chat template"):
        codec.encode_chat([{"role": "user", "content": "hi"}], None)
