"""Pages and their live parts as HTML, and their tables as CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import DictLoader, Environment, StrictUndefined

from ...producer.operator_keys import Role
from ..views.access import Access
from ..views.page import Page, Params, View
from .words import FILTERS, query

# Read now: later a loop runs that no file may hold up.
_TEMPLATES = {path.name: path.read_text() for path in (Path(__file__).parent / "templates").glob("*.html")}
# What a spreadsheet would take for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


# One for all dashboards of a process: it keeps what it has compiled.
_ENVIRONMENT = Environment(
    loader=DictLoader(_TEMPLATES),
    autoescape=True,
    auto_reload=False,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= FILTERS


class Renderer:
    """Knows the templates. All that is filled in is escaped."""

    def __init__(self, pages: Sequence[Page], *, has_login: bool = False) -> None:
        self._menu = [page for page in pages if page.nav]
        self._by_name = {page.name: page for page in pages}
        self._has_login = has_login

    def page(self, page: Page, view: View, params: Params, access: Access, root: str, note: str = "") -> str:
        """A whole page; ``note`` is told on top."""
        values = self._values(page, view, params, access, root)
        menu = [one for one in self._menu if access.role.covers(one.role)]
        return self._template(page).render(values, menu=menu, note=note, user=access.user)

    def live(self, page: Page, view: View, params: Params, access: Access, root: str) -> str:
        """The part of a page that is renewed."""
        template = self._template(page)
        return "".join(template.blocks["live"](template.new_context(self._values(page, view, params, access, root))))

    def named(self, name: str) -> Page:
        """A page by its name."""
        return self._by_name[name]

    def plain(self, name: str, root: str, **values: Any) -> str:
        """A page that shows nothing of the deployment: the login, an error."""
        return _ENVIRONMENT.get_template(f"{name}.html").render(
            url=_urls(root), has_login=self._has_login, menu=[], page=None, note="", **values
        )

    def _template(self, page: Page) -> Any:
        return _ENVIRONMENT.get_template(f"{page.name}.html")

    def _values(self, page: Page, view: View, params: Params, access: Access, root: str) -> dict[str, Any]:
        return {
            **view,
            "page": page,
            "has_login": self._has_login,
            "title": title_of(page, params),
            "params": {name: params.get(name, "") for name in page.query},
            "url": _urls(root),
            "may": lambda role: access.role.covers(Role(role)),
            "sees_contents": access.sees_contents,
        }


def _urls(root: str) -> Any:
    return lambda path, **values: f"{root}{path}{query(**values)}"


def title_of(page: Page, params: Params) -> str:
    """The title of a page's window."""
    values = {name: params.get(name, "") for name in page.query}
    return page.title.format(**values).strip(" ·")


def as_json(view: View) -> bytes:
    """What a page shows as JSON: its facts and the rows of its table."""
    told = {"facts": view.get("facts", {}), "rows": view.get("rows", [])}
    return msgspec.json.format(msgspec.json.encode(told)) + b"\n"


def as_csv(view: View) -> str:
    """The rows of a page's table; what a spreadsheet would take for a formula has an apostrophe before it."""
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
