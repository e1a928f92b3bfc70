"""A model's chat template, rendered in jinja2's sandbox with the names that templates on the hub expect.

Source: transformers, "Chat templates" (``tools`` and ``documents`` are None without any; tools may have a separate
template). Tags, filters and globals are in ``chat_environment.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateError, meta

from ...shared.errors import ModelLoadError, PenstockError, RequestFailedError, ValidationError
from ...shared.process.boundary import describe
from .chat_environment import make_environment
from .chat_messages import MessageForm, Messages
from .model_files import read_json

CHAT_TEMPLATE_FAILED = "chat_template_failed"


class ChatTemplate:
    """Template that converts chat messages into the text format of the model's training.

    Attributes:
        uses_tools: whether it reads ``tools``. If it does not, the model never learns which tools it has.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], tool_use_source: str | None = None) -> None:
        environment = make_environment()
        self.source, self.tool_use_source = source, source if tool_use_source is None else tool_use_source
        try:
            self._template = environment.from_string(self.source)
            self._tool_use_template = environment.from_string(self.tool_use_source)
            names = meta.find_undeclared_variables(environment.parse(self.tool_use_source))
        except TemplateError as error:
            raise ModelLoadError(f"the chat template cannot be read: {error}") from error
        self.uses_tools = "tools" in names
        self._special_tokens = special_tokens
        self._form = MessageForm(self._render)

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any]) -> ChatTemplate | None:
        """Return the template of ``chat_template.json``, ``chat_template.jinja`` or ``config``; None without one.

        Args:
            config: contents of ``tokenizer_config.json``.
        """
        source = read_json(folder / "chat_template.json").get("chat_template")  # of a processor
        path = folder / "chat_template.jinja"
        if source is None:
            source = path.read_text() if path.is_file() else config.get("chat_template")
        tool_use_path, tool_use_source = folder / "additional_chat_templates" / "tool_use.jinja", None
        if tool_use_path.is_file():
            tool_use_source = tool_use_path.read_text()
        if isinstance(source, list):  # several named templates
            named = {template.get("name"): template.get("template") for template in source}
            source, tool_use_source = named.get("default"), named.get("tool_use")
        if not source:
            return None
        names = read_json(folder / "special_tokens_map.json")
        return cls(source, {**_special_tokens(config), **_special_tokens(names)}, tool_use_source)

    @staticmethod
    def missing() -> ValidationError:
        return ValidationError("messages: this model has no chat template; pass the prompt as text or token ids")

    def render(self, messages: Messages, kwargs: dict[str, Any]) -> str:
        """Return the prompt text for ``messages``; ``kwargs`` are further names for the template, such as ``tools``.

        Raises:
            ValidationError: a message is invalid, or the template refuses the messages or fails on them.
            RequestFailedError: the template fails on any messages.
        """
        try:
            return self._render(self._form.apply(messages), {"add_generation_prompt": True, **kwargs})
        except PenstockError:
            raise
        except TemplateError as error:
            raise ValidationError(f"messages: the chat template refuses them: {error}") from error
        except BaseException as error:  # nothing is awaited here, so this cancels no task
            if self._is_broken():
                message = f"the chat template of the model fails on every chat: {describe(error)}"
                raise RequestFailedError(message, code=CHAT_TEMPLATE_FAILED) from error
            raise ValidationError(
                f"messages: the chat template refuses them, or the tools or chat_template_kwargs: {describe(error)}"
            ) from error

    def _is_broken(self) -> bool:
        """Return whether the template fails on the simplest chat, so that the caller's messages are not the cause."""
        try:
            self._render([{"role": "user", "content": "hi"}], {"add_generation_prompt": True})
        except TemplateError:
            return False
        except BaseException:  # as above
            return True
        return False

    def _render(self, messages: Messages, names: dict[str, Any]) -> str:
        template = self._template if names.get("tools") is None else self._tool_use_template
        return template.render(
            {"tools": None, "documents": None, **self._special_tokens, **names, "messages": messages}
        )


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens
