from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _played_engines_stay() -> None:
    """Overrides that of all: here leases end by a clock that stands still between two lines of a test."""
