"""Screenshots of ``penstock top`` for documents."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...producer.control.secret_keys import Role
from ...shared.connection import CommandConnection
from ...shared.keys import Keys
from ..top.app import Top
from ..views.access import Access
from ..views.source import Source

SIZE = (80, 24)
# A picture loads nothing from elsewhere; without the font any other of fixed width does.
_FONT = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)


async def picture(url: str, namespace: str, keys: Sequence[str], words: str) -> str:
    """Return an SVG of the screen after these keys were pressed and ``words`` have come, of a running deployment."""
    connection = CommandConnection(url)
    source = Source(url, connection, Keys(namespace))
    try:
        await source.open()
        app = Top(source, Access("", Role.VIEWER), redis_url="redis://localhost:6379")
        async with app.run_test(size=SIZE) as pilot:
            await pilot.press(*keys)
            svg = ""
            while words not in svg.replace("&#160;", " "):
                await pilot.pause(0.2)
                svg = app.export_screenshot(title="penstock top")
            return _FONT.sub("", svg)
    finally:
        await source.close()
