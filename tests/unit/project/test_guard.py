"""The fixture that catches blocking calls does catch them."""

from __future__ import annotations

from pathlib import Path

import pytest
from blockbuster import BlockingError

import penstock.shared.keys


async def test_a_blocking_call_in_our_code_inside_the_loop_fails() -> None:
    inside = Path(penstock.shared.keys.__file__).with_name("probe.py")
    probe = compile("import time; time.sleep(0)", str(inside), "exec")
    with pytest.raises(BlockingError):
        exec(probe)
