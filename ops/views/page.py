"""Pages and actions as values."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...producer.control.secret_keys import Role
from ...shared.errors import ValidationError
from .access import Access
from .source import PageSnapshot, Source

# Titles in the runbook (ops/guide/operating/alerts.md) by the code of a problem.
RUNBOOK: Mapping[str, str] = {
    "engine_broken": "PenstockEngineDead",
    "model_away": "PenstockRedisAway",
    "no_engine": "PenstockNoEngine",
    "no_jobs": "No jobs process",
    "parked": "PenstockDeadLetterGrows",
    "paused": "PenstockPausedForLong",
    "redis_cannot_write": "PenstockRedisNotPersistent",
    "redis_evicts": "PenstockRedisNearlyFull",
    "redis_is_replica": "PenstockRedisAway",
    "redis_nearly_full": "PenstockRedisNearlyFull",
    "redis_not_persistent": "PenstockRedisNotPersistent",
    "unknown_model": "PenstockNoEngine",
    "webhooks_given_up": "PenstockWebhooksGivenUp",
}
# Parameters of the query, by name.
Params = Mapping[str, str]
View = dict[str, Any]


@dataclass(frozen=True)
class Page:
    """A page: its address, its live part, and the table for CSV and JSON.

    Args:
        name: name of the template and of the route.
        path: path below the application's root. The query selects what is shown, since names may contain slashes.
        title: title of the window; may contain parameters of the query in braces.
        read: returns the values for the template. ``rows`` in it is the table of CSV and JSON: dictionaries with the
            same keys. Prompts and outputs are left out unless the operator may see them.
        live: whether the page's first section is updated once a second.
        query: parameters of the query that change the page.
        nav: label in the menu; empty if the page is reached from another page.
        role: role needed to see the page.
    """

    name: str
    path: str
    title: str
    read: Callable[[PageSnapshot, Params, Access], Awaitable[View]]
    live: bool = True
    query: tuple[str, ...] = ()
    nav: str = ""
    role: Role = Role.VIEWER


@dataclass(frozen=True)
class ActionContext:
    """Arguments of an action: the deployment, the form, and the operator."""

    source: Source
    form: Mapping[str, str]
    access: Access


@dataclass(frozen=True)
class Action:
    """A change, requested by a POST.

    Args:
        path: path below the application's root.
        role: role needed.
        do: makes the change and returns a sentence about it.
        back: name of the page to show afterwards. Fields of the form that are in its query are passed on.
        confirm: field of the form whose value must be typed again, for destructive changes.
        is_shown_once: the sentence contains a secret. It is sent in the response only and stored nowhere.
    """

    path: str
    role: Role
    do: Callable[[ActionContext], Awaitable[str]]
    back: str
    confirm: str = ""
    is_shown_once: bool = False


@dataclass(frozen=True)
class PageSection:
    """The pages and actions of a module of ``pages``."""

    pages: tuple[Page, ...]
    actions: tuple[Action, ...] = field(default=())


def problem_of(text: str, path: str, code: str, *, level: str = "bad", model: str = "") -> View:
    """Return a problem to show: its sentence, the page about it, and the part of the runbook for its code."""
    return {"text": text, "path": path, "level": level, "model": model, "runbook": RUNBOOK[code]}


def number_field(name: str, text: str) -> float:
    """Return the number in a field of a form.

    Raises:
        ValidationError: it is not a number.
    """
    try:
        return float(text)
    except ValueError:
        raise ValidationError(f"{name} must be a number, got {text!r}") from None


def field_of(form: Mapping[str, str], name: str) -> str:
    """Return a required field of a form.

    Raises:
        ValidationError: the field is empty or missing.
    """
    value = form.get(name, "").strip()
    if not value:
        raise ValidationError(f"{name} is missing; fill it in")
    return value
