"""Tests that share a stack run in one process."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("sources")
def test_a_group_of_tests_is_one_to_xdist(request: pytest.FixtureRequest) -> None:
    """The ends of ids show it; some releases of pytest and pytest-xdist do not agree on where an id is kept."""
    if request.config.getoption("loadgroup", default=False):
        assert request.node.nodeid.endswith("@sources")
