"""What a page is: an address, what it reads, what it shows, and what can be done there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...producer.operator_keys import Role
from ...shared.errors import ValidationError
from .access import Access
from .source import Moment, Source

# Those of the query, by name.
Params = Mapping[str, str]
View = dict[str, Any]


@dataclass(frozen=True)
class Page:
    """A page, its live part, and the table that its CSV and JSON hold.

    Args:
        name: of its template, and of the route.
        path: below the application's root. What is shown is chosen by the query, since names may hold slashes.
        title: of the window; may name parameters of the query in braces.
        read: returns what the template shows. ``rows`` in it is the table of CSV and JSON: dictionaries with the same
            keys. What belongs to contents is not in it unless the reader may see them.
        live: whether the page's first section is renewed once a second.
        query: names of the query that change what is shown.
        nav: its word in the menu; none if it is reached from another page.
        role: who may see it.
    """

    name: str
    path: str
    title: str
    read: Callable[[Moment, Params, Access], Awaitable[View]]
    live: bool = True
    query: tuple[str, ...] = ()
    nav: str = ""
    role: Role = Role.VIEWER


@dataclass(frozen=True)
class Act:
    """What an action is given: the deployment, and the form."""

    source: Source
    form: Mapping[str, str]
    access: Access


@dataclass(frozen=True)
class Action:
    """A change, made by a POST.

    Args:
        path: below the application's root.
        role: who may.
        do: makes the change and returns a sentence that says what was done.
        back: name of the page that shows it afterwards, with what of the form is its query.
        confirm: field of the form whose value has to be typed again, for what destroys.
        is_shown_once: the sentence is a secret: it stands in the answer itself, and is kept nowhere.
    """

    path: str
    role: Role
    do: Callable[[Act], Awaitable[str]]
    back: str
    confirm: str = ""
    is_shown_once: bool = False


@dataclass(frozen=True)
class Room:
    """What a module of ``pages`` holds."""

    pages: tuple[Page, ...]
    actions: tuple[Action, ...] = field(default=())


def field_of(form: Mapping[str, str], name: str) -> str:
    """Return a field that must be filled.

    Raises:
        ValidationError: it is empty.
    """
    value = form.get(name, "").strip()
    if not value:
        raise ValidationError(f"{name} must be given")
    return value
