"""A model's chat template, rendered in jinja2's sandbox with the names that templates on the hub expect.

Source: transformers, "Chat templates" (trim_blocks, lstrip_blocks, ``raise_exception``, ``strftime_now``, ``tojson``).
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...shared.errors import ModelLoadError, ValidationError


class ChatTemplate:
    """Turns chat messages into the text the model was trained on."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelLoadError(f"the chat template cannot be read: {error}") from error
        self._special_tokens = special_tokens

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any]) -> ChatTemplate | None:
        """Return the template of ``chat_template.jinja`` or of the tokenizer's configuration, or None."""
        path = folder / "chat_template.jinja"
        source = path.read_text() if path.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several named templates
            source = next((t["template"] for t in source if t.get("name") == "default"), None)
        if not source:
            return None
        return cls(source, _special_tokens(config))

    @staticmethod
    def missing() -> ValidationError:
        return ValidationError("messages: this model has no chat template; pass the prompt as text or token ids")

    def render(self, messages: list[dict[str, Any]], kwargs: dict[str, Any]) -> str:
        """Return the prompt text for ``messages``.

        Raises:
            ValidationError: the template refuses the messages, or fails on them.
        """
        names = {"add_generation_prompt": True, **self._special_tokens, **kwargs, "messages": messages}
        try:
            return self._template.render(**names)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ValidationError(f"messages: the chat template refuses them: {error}") from error


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
