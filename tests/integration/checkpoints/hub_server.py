"""A server on this host that speaks the model hub's protocol."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """Hub that serves ``repositories``: folders by name.

    Args:
        gated: names of repositories whose files need a token.
    """

    def __init__(self, repositories: dict[str, Path], gated: tuple[str, ...] = ()) -> None:
        self.repositories = repositories
        self.gated = gated
        # Downloads as (file, first byte).
        self.downloads: list[tuple[str, int]] = []
        # Name of the file whose next download ends after half of its bytes.
        self.interrupted = ""
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop to listen. A second call has no effect."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Answers one request to the hub."""

    hub: HubServer

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        for name, folder in self.hub.repositories.items():
            if path.startswith(f"/api/models/{name}/"):
                self._answer_api(name, folder, path.removeprefix(f"/api/models/{name}/"))
                return
            if path.startswith(f"/{name}/resolve/"):
                self._send_file(name, folder, path.removeprefix(f"/{name}/resolve/").partition("/")[2])
                return
        self._refuse(404, "RepoNotFound")

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""

    def _answer_api(self, name: str, folder: Path, path: str) -> None:
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        content: object
        if path.startswith("tree/"):
            content = [
                {
                    "type": "file",
                    "path": file.relative_to(folder).as_posix(),
                    "size": file.stat().st_size,
                    "oid": _digest(file.read_bytes()),
                }
                for file in files
            ]
        else:
            siblings = [{"rfilename": file.relative_to(folder).as_posix()} for file in files]
            content = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, name: str, folder: Path, file: str) -> None:
        if name in self.hub.gated and not self.headers.get("Authorization"):
            self._refuse(401, "GatedRepo")
            return
        if not (folder / file).is_file():
            self._refuse(404, "EntryNotFound")
            return
        content = (folder / file).read_bytes()
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if first else 200)
        self.send_header("ETag", f'"{_digest(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.hub.downloads.append((file, first))
        end = len(content)
        if file == self.hub.interrupted:
            self.hub.interrupted, end = "", len(content) // 2
        self.wfile.write(content[first:end])
        self.close_connection = True

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
