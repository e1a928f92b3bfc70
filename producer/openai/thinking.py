"""Options of thinking in chat bodies: OpenAI's ``reasoning_effort``, and the names that other APIs have for it."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

from ...shared.values.shown import shown
from .errors import bad_field
from .reasoning import SWITCHES, effort_kwargs

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Anthropic's and GLM's option. "adaptive", "auto" and "between_tools" leave the choice to the model."""

    type: Literal["enabled", "disabled", "adaptive", "auto", "between_tools"]
    budget_tokens: int | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenRouter's option; ``exclude`` is the opposite of ``include_reasoning``. Summaries are not generated."""

    effort: Effort | None = None
    max_tokens: int | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    summary: str | None = None


class ThinkingFields(Protocol):
    """The fields of a chat body that concern thinking and the length of the answer."""

    reasoning_effort: Effort | None
    reasoning: ReasoningOptions | None
    thinking: Thinking | bool | None
    enable_thinking: bool | None
    verbosity: Verbosity | None


def thinking_kwargs(body: ThinkingFields) -> dict[str, Any]:
    """Return the arguments of the chat template for the options of a body. Templates ignore those they do not read.

    Raises:
        OpenAIError: 400, two fields contradict each other.
    """
    reasoning = body.reasoning or ReasoningOptions()
    if body.reasoning_effort and reasoning.effort and body.reasoning_effort != reasoning.effort:
        raise bad_field(
            "reasoning.effort",
            f"reasoning.effort {shown(reasoning.effort)} differs from reasoning_effort {shown(body.reasoning_effort)}; "
            "pass one of them",
        )
    kwargs: dict[str, Any] = {}
    switches = (body.enable_thinking, _is_on(body.thinking), reasoning.enabled)
    is_on = next((switch for switch in switches if switch is not None), None)
    if is_on is not None:
        kwargs |= dict.fromkeys(SWITCHES, is_on)
    effort = body.reasoning_effort or reasoning.effort
    if effort is not None:
        kwargs |= effort_kwargs(effort)
    if body.verbosity in ("low", "high"):
        kwargs["verbosity"] = body.verbosity
    return kwargs


def thinking_budget(body: ThinkingFields) -> int | None:
    """Return the limit of thinking in tokens; None without one."""
    if isinstance(body.thinking, Thinking) and body.thinking.budget_tokens is not None:
        return body.thinking.budget_tokens
    return None if body.reasoning is None else body.reasoning.max_tokens


def _is_on(thinking: Thinking | bool | None) -> bool | None:
    if isinstance(thinking, Thinking):
        return {"enabled": True, "disabled": False}.get(thinking.type)
    return thinking
