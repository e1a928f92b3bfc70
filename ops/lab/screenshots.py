"""``make screenshots``: pictures of the operators' pages and of `penstock top`, over a busy deployment.

Needs Chromium, and playwright and textual, which the extra ``dev`` has; ``PENSTOCK_CHROMIUM`` names a browser that is
not on the PATH. An engine is killed in the middle of one request, so that its page shows a handover.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from ...producer import Client, SamplingParams
from ...shared.errors import ConfigurationError
from ...shared.process.command_line import run_reporting_errors
from ...shared.values.names import DEFAULT_NAMESPACE
from ..demo.busy import MODEL_NAME, keep_busy
from ..demo.run import MODEL
from ..local.server import LocalServer
from ..local.stack import LocalStack

if TYPE_CHECKING:
    from playwright.async_api import Page

FOLDER = Path(__file__).parents[1] / "guide" / "images"
WIDTH, HEIGHT = 1200, 800
MAX_BYTES = 150_000
# Charts show minutes that have ended.
BUSY_S = 240.0
# Tokens of the request whose engine is killed: before the kill, and in total.
TOKENS_BEFORE, TOKENS = 60, 200
REQUEST_ID = "survives-its-engine"
# By the name of the picture: path and query.
PAGES = {
    "overview": ("/", {}),
    "queue": ("/queue", {"model": MODEL_NAME}),
    "request": ("/request", {"model": MODEL_NAME, "id": REQUEST_ID}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the pictures go (ops/guide/images)")
    parser.add_argument("--busy", type=float, default=BUSY_S, metavar="SECONDS", help="of work before them (240)")
    arguments = parser.parse_args()
    return run_reporting_errors(lambda: make_pictures(arguments.folder, arguments.busy))


def make_pictures(folder: Path, busy_s: float) -> int:
    """Write dashboard-*.png and top.svg into ``folder``, and return 0.

    Raises:
        ConfigurationError: a program or library is missing, or a picture is too large to be kept.
    """
    browser = os.environ.get("PENSTOCK_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if not browser:
        raise ConfigurationError("there is no Chromium here; install it, or name it by PENSTOCK_CHROMIUM")
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--device", "cpu", "--engines", "2", "--served-model-name", MODEL_NAME, "--max-num-seqs", "6"]
    with (
        tempfile.TemporaryDirectory() as logs,
        LocalStack(MODEL, options) as stack,
        LocalServer("dashboard", stack.url, ["--show-contents"], Path(logs) / "dashboard.log") as server,
    ):
        print(f"busy for {busy_s:g} s …", flush=True)
        asyncio.run(_work_and_look(stack.url, server.base_url, browser, folder, busy_s))
    too_large = [path.name for path in folder.glob("dashboard-*.png") if path.stat().st_size > MAX_BYTES]
    if too_large:
        raise ConfigurationError(f"larger than {MAX_BYTES} bytes: {', '.join(too_large)}")
    return 0


async def _work_and_look(url: str, base_url: str, browser: str, folder: Path, busy_s: float) -> None:
    from .terminal_picture import picture

    working = asyncio.create_task(keep_busy(url))
    try:
        await asyncio.sleep(busy_s)
        await _survive(url)
        await _photograph(base_url, browser, folder)
        svg = await picture(url, DEFAULT_NAMESPACE, ["3"], "running")
        await asyncio.to_thread((folder / "top.svg").write_text, svg)
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working


async def _survive(url: str) -> None:
    """Kill the engine of a request in the middle, and wait for its end."""
    async with Client.connect(url, model=MODEL_NAME) as client:
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, min_tokens=TOKENS)
        prompt = "count from one to a hundred:"
        handle = await client.submit(prompt, params, request_id=REQUEST_ID, tenant="acme", band="interactive")
        engines = {engine.engine_id: engine for engine in await client.engines()}
        num_tokens = 0
        async for delta in handle.stream():
            num_tokens, before = num_tokens + len(delta.token_ids), num_tokens
            if before < TOKENS_BEFORE <= num_tokens:
                engine_id = (await client.status(REQUEST_ID)).engine_id
                os.kill(engines[engine_id].core_pid, signal.SIGKILL)


async def _photograph(base_url: str, browser: str, folder: Path) -> None:
    from playwright.async_api import async_playwright

    async with async_playwright() as running:
        chromium = await running.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page: Page = await chromium.new_page(
            viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light", reduced_motion="reduce"
        )
        for name, (path, query) in PAGES.items():
            await page.goto(f"{base_url}{path}?{urlencode(query)}")
            await page.wait_for_selector("#pulse.good")  # its figures move
            path_here = folder / f"dashboard-{name}.png"
            await page.screenshot(path=path_here)
            print(path_here, flush=True)
        await chromium.close()


if __name__ == "__main__":
    raise SystemExit(main())
