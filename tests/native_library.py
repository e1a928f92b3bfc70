"""Tests that load or unload the compiled kernels, which are one for a process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.kernels import native


@contextmanager
def native_as_before() -> Iterator[None]:
    """Restore the loaded library for the next test, whatever is loaded or unloaded within."""
    was_loaded = native.is_loaded()
    try:
        yield
    finally:
        if not was_loaded:
            native.unload()
        elif not native.is_loaded():
            native.load()


@pytest.fixture
def references() -> Iterator[None]:
    """No compiled kernels, though an engine of this process may have loaded them."""
    with native_as_before():
        native.unload()
        yield
