"""Routes of pages (HTML, live part, CSV, JSON) and of actions (POST)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import parse_qsl, quote, unquote

from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ...producer.sse import EventStream
from ...shared.errors import (
    EngineNotFoundError,
    PenstockError,
    RedisUnavailableError,
    RequestNotFoundError,
    UnknownBatchError,
    UnknownModelError,
    ValidationError,
)
from ...shared.values.shown import shown
from ..views.access import Access
from ..views.page import Action, ActionContext, Page, View
from ..views.source import PageSnapshot
from .columns import COLUMNS_COOKIE, HIDDEN, hidden_after, hidden_of
from .filters import FILTERS_COOKIE, filters_after, saved_filters
from .render import Renderer, as_csv, as_json, query
from .runtime import DashboardRuntime, Topic

NOTE_COOKIE = "penstock_note"
MAX_NOTE_CHARS = 500
CHOICES_S = 365 * 24 * 3600
MAX_FORM_BYTES = 64 * 1024

_UNKNOWN = (UnknownModelError, RequestNotFoundError, EngineNotFoundError, UnknownBatchError)

# Titles of error pages by status.
_TITLES = {403: "Not allowed", 404: "Not found", 500: "Error", 503: "Redis is unavailable"}

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


class Endpoints:
    """Factory of the routes of pages and actions."""

    def __init__(self, runtime: DashboardRuntime, renderer: Renderer) -> None:
        self._runtime = runtime
        self._renderer = renderer

    def of_page(self, page: Page) -> list[Route]:
        """Return the routes of a page: HTML, its table as CSV and JSON, and the stream of its live part."""
        stem = page.path if page.path != "/" else f"/{page.name}"
        routes = [
            Route(page.path, self._guarded(page, self._html)),
            Route(f"{stem}.csv", self._guarded(page, self._csv)),
            Route(f"{stem}.json", self._guarded(page, self._page_as_json)),
        ]
        if page.live:
            routes.append(Route(f"/live{stem}", self._guarded(page, self._stream)))
        return routes

    def of_action(self, action: Action) -> Endpoint:
        """Return the endpoint for the POST of an action."""

        async def endpoint(request: Request) -> Response:
            access: Access = request.state.access
            if not access.role.covers(action.role):
                return self._error_page(request, f"this needs the role {action.role}; yours is {access.role}", 403)
            await self._runtime.open()
            body = await read_form(request)
            if body is None:
                return self._error_page(request, "the form is too large", 413)
            context = ActionContext(self._runtime.source, body, access)
            if action.confirm and body.get("confirm", "") != body.get(action.confirm, ""):
                expected = shown(body.get(action.confirm, ""))
                return self._error_page(request, f"nothing was done: type {expected} to confirm", 400)
            try:
                note = await action.do(context)
            except (PenstockError, RedisError) as error:
                return self._error_page(request, f"nothing was done: {error}", _status_of(error))
            finally:
                self._runtime.source.clear_cache()
            page = self._renderer.named(action.back)
            params = _params_after(page, body) | _hidden(request)
            if action.is_shown_once:
                view = await self._read_view(page, params, access)
                return HTMLResponse(self._renderer.page(page, view, params, access, root_of(request), note))
            response = RedirectResponse(_address(request, page, params), 303)
            response.set_cookie(
                NOTE_COOKIE, quote(note[:MAX_NOTE_CHARS]), max_age=60, path=root_of(request) or "/", httponly=True
            )
            return response

        return endpoint

    async def choose_columns(self, request: Request) -> Response:
        """Store the visible columns of a page's tables in this browser."""

        def choose(page: Page, body: dict[str, str]) -> str:
            return hidden_after(page.name, body, hidden_of(request.cookies))

        return await self._store(request, COLUMNS_COOKIE, choose)

    async def save_filter(self, request: Request) -> Response:
        """Store the query of a page under a name in this browser, or remove a name."""

        def save(page: Page, body: dict[str, str]) -> str:
            return filters_after(
                saved_filters(request.cookies), page.name, body, query(**_params_after(page, body))[1:]
            )

        return await self._store(request, FILTERS_COOKIE, save)

    async def _store(self, request: Request, cookie: str, value_of: Callable[[Page, dict[str, str]], str]) -> Response:
        """Store a choice about a page in a cookie, and show the page as before."""
        body = await read_form(request) or {}
        try:
            page = self._renderer.named(body.get("page", ""))
            value = value_of(page, body)
        except ValidationError as error:
            return self._error_page(request, f"nothing was done: {error}", 400)
        response = RedirectResponse(_address(request, page, _params_after(page, body)), 303)
        path = root_of(request) or "/"
        response.set_cookie(cookie, value, max_age=CHOICES_S, path=path, httponly=True, samesite="lax")
        return response

    async def not_found(self, request: Request, _: Exception) -> Response:
        """Return the error page for an unknown path."""
        return self._error_page(request, f"page {shown(request.url.path)} does not exist", 404)

    async def failed(self, request: Request, error: Exception) -> Response:
        """Return the error page for an unexpected exception, which the server logs."""
        return self._error_page(request, "this page cannot be shown; the dashboard's log has the reason", 500)

    def _guarded(self, page: Page, answer: Callable[[Page, Request], Awaitable[ASGIApp]]) -> Endpoint:
        async def endpoint(request: Request) -> ASGIApp:
            if not request.state.access.role.covers(page.role):
                return self._error_page(request, f"this page needs the role {page.role}", 403)
            try:
                await self._runtime.open()
                return await answer(page, request)
            except (PenstockError, RedisError) as error:
                return self._error_page(request, str(error), _status_of(error))

        return endpoint

    async def _html(self, page: Page, request: Request) -> Response:
        params, access = _params(page, request), request.state.access
        view = await self._read_view(page, params, access)
        note = unquote(request.cookies.get(NOTE_COOKIE, ""))
        saved = [one for one in saved_filters(request.cookies) if one.page == page.name]
        response = HTMLResponse(self._renderer.page(page, view, params, access, root_of(request), note, saved))
        if note:
            response.delete_cookie(NOTE_COOKIE, path=root_of(request) or "/")
        return response

    async def _csv(self, page: Page, request: Request) -> Response:
        view = await self._read_view(page, _params(page, request), request.state.access)
        disposition = f'attachment; filename="penstock-{page.name}.csv"'
        return Response(as_csv(view), media_type="text/csv", headers={"content-disposition": disposition})

    async def _page_as_json(self, page: Page, request: Request) -> Response:
        view = await self._read_view(page, _params(page, request), request.state.access)
        return Response(as_json(view), media_type="application/json")

    async def _stream(self, page: Page, request: Request) -> ASGIApp:
        access: Access = request.state.access
        params = tuple(sorted(_params(page, request).items()))
        # The path of the stream is one level deeper than that of the page, under the same root.
        topic = Topic(page, params, access.role, access.sees_contents, root_of(request))
        return EventStream(self._runtime.watcher.follow(topic), status_wait_s=0.0)

    async def _read_view(self, page: Page, params: dict[str, str], access: Access) -> View:
        snapshot = PageSnapshot(self._runtime.source)
        try:
            return await page.read(snapshot, params, access)
        finally:
            await snapshot.close()

    def _error_page(self, request: Request, message: str, status: int) -> Response:
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(message + "\n", status)
        title = _TITLES.get(status, "Not done")
        html = self._renderer.problem(title, message, getattr(request.state, "access", None), root_of(request))
        return HTMLResponse(html, status)


def root_of(request: Request) -> str:
    return request.scope.get("root_path", "").rstrip("/")


def _params(page: Page, request: Request) -> dict[str, str]:
    """Return the parameters of the query that the page knows, and the columns that the browser hides."""
    params = {name: request.query_params[name] for name in page.query if request.query_params.get(name)}
    return params | _hidden(request)


def _hidden(request: Request) -> dict[str, str]:
    hidden = hidden_of(request.cookies)
    return {HIDDEN: hidden} if hidden else {}


def _params_after(page: Page, body: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of the page after a form: those of the page before it, or fields of the form."""
    before = dict(parse_qsl(body.get("back", "")))
    return {name: value for name in page.query if (value := before.get(name) or body.get(name, ""))}


def _address(request: Request, page: Page, params: Mapping[str, str]) -> str:
    return f"{root_of(request)}{page.path}{query(**{name: params.get(name, '') for name in page.query})}"


async def read_form(request: Request) -> dict[str, str] | None:
    """Return the fields of a form; None if it is too large."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_FORM_BYTES:
            return None
    return dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))


def _status_of(error: Exception) -> int:
    if isinstance(error, RedisUnavailableError | RedisError):
        return 503
    return 404 if isinstance(error, _UNKNOWN) else 400
