"""A model's chat template, rendered in jinja2's sandbox with the names that templates on the hub expect.

Sources: transformers, "Chat templates" (``tools`` and ``documents`` are None without any; tools may have a separate
template), and ``transformers.utils.chat_template_utils``. Extensions: ``loopcontrols`` and the tag ``generation``.
Filters: ``tojson`` without HTML escapes. Globals: ``raise_exception``, ``strftime_now``, and ``dict`` and ``namespace``
of which templates cannot reach Python.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ...shared.errors import ModelLoadError, PenstockError, RequestFailedError, ValidationError
from ...shared.process.boundary import describe
from ...shared.values.shown import shown
from .chat_messages import MessageForm
from .message_roles import Messages, RoleSupport
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
        self._form = MessageForm(self.source, self._render)

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

    @property
    def roles(self) -> RoleSupport:
        """Places of instructions that the template renders."""
        return self._form.roles

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


def make_environment() -> ImmutableSandboxedEnvironment:
    """Return an environment that compiles and renders templates as transformers does."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class _GenerationTag(Extension):
    """The tag ``{% generation %}…{% endgeneration %}``, which marks a reply for training and renders its content.

    The content has a separate scope, as in transformers, where it is the body of a call.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it without ClassVar

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return caller()


class _Dict:
    """The ``dict`` of templates: a function, so that no attribute of the class can be reached."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """The ``namespace`` of templates, which refuses names with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # Without a parameter named self, so that a template may write namespace(self=...).
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template cannot store {shown(name)} in a namespace: it begins with an underscore")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
