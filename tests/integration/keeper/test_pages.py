"""The dashboard's bar of a device and its buttons, in a real Chromium, with a worker that two models share."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from penstock.ops.local.server import LocalServer
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.audit import Audit
from penstock.shared.keys import Keys

from ...browser import CHROMIUM, PATIENCE_MS, needs_chromium
from ..supervisor.conftest import run_worker
from .conftest import ShareDevice

pytestmark = [pytest.mark.slow, needs_chromium]
playwright = pytest.importorskip("playwright.async_api", reason="no playwright")


async def test_an_operator_wakes_pins_and_puts_a_model_to_sleep_by_clicks(
    share_device: ShareDevice,
    commands: CommandConnection,
    redis_url: str,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = await share_device("a", "b")
    # The browser has a socket in the folder of temporary files, whose path must be short.
    monkeypatch.delenv("TMPDIR")
    options = ["--namespace", namespace]
    async with playwright.async_playwright() as running, AsyncExitStack() as stack:
        browser = await running.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        stack.push_async_callback(browser.close)
        site = LocalServer("dashboard", redis_url, options, tmp_path / "dashboard.log")
        stack.push_async_callback(asyncio.to_thread, site.stop)
        await asyncio.to_thread(site.start)
        page = await browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        troubles: list[str] = []
        page.on("pageerror", lambda error: troubles.append(str(error)))
        await page.goto(f"{site.base_url}/engines")
        bar = page.locator(".device svg")
        assert "a " in await bar.get_attribute("aria-label")
        row = page.locator(".device tbody tr", has=page.get_by_role("link", name="b", exact=True))
        for button, note, words, record in (
            ("Wake", "b is loaded", "awake", (True, False, False)),
            ("Pin", "b is loaded and pinned", "awake, pinned", (True, True, False)),
            ("Unpin", "b may leave the device", "awake", (True, False, False)),
            ("Sleep", "b sleeps until it is loaded", ", by an operator", (False, False, True)),
        ):
            await row.get_by_role("button", name=button, exact=True).click()
            await page.get_by_text(note, exact=True).wait_for()
            await row.locator(".light", has_text=words).wait_for()
            in_redis = await worker.model("b")
            assert (in_redis.level == 0, in_redis.is_pinned, in_redis.is_kept_asleep) == record
    assert troubles == []
    entries = [entry for entry in await Audit(commands, Keys(namespace)).read() if entry.target == "b"]
    assert [entry.action for entry in entries][::-1] == ["model.load", "model.pin", "model.unpin", "model.unload"]
    listed = await asyncio.to_thread(run_worker, "list", *options)
    assert "unloaded by an operator" in listed.stdout
    assert "of 640 MiB, swaps took" in listed.stdout
