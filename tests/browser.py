"""Chromium for tests of pages, and axe, which checks them for people who cannot see or point well.

``PENSTOCK_CHROMIUM`` names a browser that is not on the PATH.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("PENSTOCK_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or ""
PATIENCE_MS = 60_000
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no Chromium")
_AXE = Path(__file__).parent / "e2e" / "dashboard" / "vendor" / "axe.min.js"


@contextmanager
def running_chromium() -> Iterator[Any]:
    """Start the browser of playwright's synchronous interface."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


def violations(page: Any) -> list[tuple[str, str, list[str]]]:
    """Return the serious findings of axe: scheme, rule and elements.

    The schemes differ in colors only, so only the rules of colors are checked again in the dark one.
    """
    page.evaluate(_AXE.read_text())
    findings = []
    for scheme, options in (("light", "{}"), ("dark", "{runOnly: ['color-contrast', 'link-in-text-block']}")):
        page.emulate_media(color_scheme=scheme)
        findings += [
            (scheme, finding["id"], [node["html"] for node in finding["nodes"]])
            for finding in page.evaluate(f"axe.run(document, {options}).then(result => result.violations)")
            if finding["impact"] in ("serious", "critical")
        ]
    return findings
