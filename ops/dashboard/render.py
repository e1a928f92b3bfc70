"""Rendering of pages and their live parts as HTML, and of their tables as CSV and JSON; filters of the templates."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from jinja2 import DictLoader, Environment, StrictUndefined

from ...producer.control.secret_keys import Role
from ...shared.errors import ValidationError
from ...shared.values.shown import format_number, shown
from ..views.access import Access
from ..views.page import Page, Params, View
from ..views.words import (
    ago,
    amount,
    as_unit,
    cost,
    duration,
    length_of_time,
    moment,
    number,
    percent,
    plain,
    size,
    state_words,
)
from .columns import HIDDEN, table_of, tables_of
from .filters import SavedFilter

_FOLDER = Path(__file__).parent / "templates"
# Read at import, because file access would block the event loop.
_TEMPLATES = {path.relative_to(_FOLDER).as_posix(): path.read_text() for path in _FOLDER.rglob("*.html")}
# Beginnings of cells that a spreadsheet would evaluate as formulas.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
# One for all dashboards of a process, because it caches compiled templates.
_ENVIRONMENT = Environment(
    loader=DictLoader(_TEMPLATES),
    autoescape=True,
    auto_reload=False,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def segment(text: object) -> str:
    """Return a part of a path, percent-encoded."""
    return quote(str(text), safe="")


def query(**values: object) -> str:
    """Return a query string of the values that are not empty, with its question mark."""
    params = {name: value for name, value in values.items() if value not in (None, "")}
    return f"?{urlencode(params)}" if params else ""


def json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()


FILTERS = {
    "duration": duration,
    "length_of_time": length_of_time,
    "as_unit": as_unit,
    "moment": moment,
    "ago": ago,
    "state_words": state_words,
    "number": number,
    "decimal": format_number,
    "cost": cost,
    "amount": amount,
    "percent": percent,
    "size": size,
    "plain": plain,
    "segment": segment,
    "pretty_json": json,
}

_ENVIRONMENT.filters |= FILTERS


class Renderer:
    """Renderer of the templates. All values are escaped."""

    def __init__(self, pages: Sequence[Page], *, has_login: bool = False) -> None:
        self._menu = [page for page in pages if page.nav]
        self._by_name = {page.name: page for page in pages}
        self._has_login = has_login

    def page(
        self,
        page: Page,
        view: View,
        params: Params,
        access: Access,
        root: str,
        note: str = "",
        saved: Sequence[SavedFilter] = (),
    ) -> str:
        """Return a whole page, with ``note`` and links to its ``saved`` filters at the top."""
        values = self._values(page, view, params, access, root)
        menu = self._menu_of(access)
        return self._template(page).render(values, menu=menu, note=note, user=access.user, saved=saved)

    def live(self, page: Page, view: View, params: Params, access: Access, root: str) -> str:
        """Return the live part of a page."""
        template = self._template(page)
        return "".join(template.blocks["live"](template.new_context(self._values(page, view, params, access, root))))

    def named(self, name: str) -> Page:
        """Return the page with a name.

        Raises:
            ValidationError: no page has this name.
        """
        if name not in self._by_name:
            raise ValidationError(f"page must be one of {', '.join(self._by_name)}, got {shown(name)}")
        return self._by_name[name]

    def plain(self, name: str, root: str, **values: Any) -> str:
        """Return a page without data of the deployment, such as the login or an error."""
        fixed = {"url": _urls(root), "has_login": self._has_login, "menu": [], "page": None, "note": ""}
        return _ENVIRONMENT.get_template(f"{name}.html").render(fixed | values)

    def problem(self, title: str, message: str, access: Access | None, root: str) -> str:
        """Return the page about an error, with the menu if the user is known."""
        of_user = {} if access is None else {"menu": self._menu_of(access), "user": access.user}
        return self.plain("trouble_page", root, title=title, message=message, **of_user)

    def _menu_of(self, access: Access) -> list[Page]:
        return [item for item in self._menu if access.role.covers(item.role)]

    def _template(self, page: Page) -> Any:
        return _ENVIRONMENT.get_template(f"{page.name}.html")

    def _values(self, page: Page, view: View, params: Params, access: Access, root: str) -> dict[str, Any]:
        query_params = {name: params.get(name, "") for name in page.query}
        has_actions = access.role.covers(Role.OPERATOR)
        return {
            "now": time.time(),
            **view,
            "page": page,
            "has_login": self._has_login,
            "title": title_of(page, params),
            "params": query_params,
            "back": query(**query_params).removeprefix("?"),
            "hidden": params.get(HIDDEN, ""),
            "tables": tables_of(page.name),
            "shape_of": lambda key: table_of(page.name, key, has_actions=has_actions),
            "url": _urls(root),
            "may": lambda role: access.role.covers(Role(role)),
            "sees_contents": access.sees_contents,
        }


def _urls(root: str) -> Any:
    return lambda path, **values: f"{root}{path}{query(**values)}"


def title_of(page: Page, params: Params) -> str:
    """Return the title of a page's window."""
    values = {name: params.get(name, "") for name in page.query}
    return page.title.format(**values).strip(" ·")


def as_json(view: View) -> bytes:
    """Return the facts and table rows of a page as JSON."""
    content = {"facts": view.get("facts", {}), "rows": view.get("rows", [])}
    return msgspec.json.format(msgspec.json.encode(content)) + b"\n"


def as_csv(view: View) -> str:
    """Return the rows of a page's table as CSV. Cells that look like formulas are prefixed with an apostrophe."""
    rows = view.get("rows", [])
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, list | dict):
        value = msgspec.json.encode(value).decode()
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
