"""Styles and scripts, served from memory so that the event loop never waits for a file."""

from __future__ import annotations

import hashlib
import mimetypes
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent / "static"
_FILES = {
    path.relative_to(_FOLDER).as_posix(): path.read_bytes()
    for path in _FOLDER.rglob("*")
    if path.suffix in (".css", ".js", ".svg")
}
MAX_AGE_S = 300


def static_routes() -> list[Route]:
    """Return a route for each file."""
    return [Route(f"/static/{name}", _sender(name, data)) for name, data in _FILES.items()]


def _sender(name: str, data: bytes) -> Callable[[Request], Awaitable[Response]]:
    kind = mimetypes.types_map[Path(name).suffix]
    headers = {"etag": f'"{hashlib.sha256(data).hexdigest()[:16]}"', "cache-control": f"private, max-age={MAX_AGE_S}"}

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=kind, headers=headers)

    return send
