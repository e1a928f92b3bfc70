"""Tests that load or unload the compiled kernels, which are one for a process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.kernels import native
from penstock.kernels.native.build import default_cache_folder


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
def compiled() -> Iterator[None]:
    """The compiled kernels; without them the test is skipped."""
    with native_as_before():
        if (reason := native.load()) is not None:
            pytest.skip(reason)
        yield


@pytest.fixture
def references() -> Iterator[None]:
    """No compiled kernels, though an engine of this process may have loaded them."""
    with native_as_before():
        native.unload()
        yield


def use_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache derived files in ``folder`` during the test, but keep the compiled kernels, which take half a minute."""
    kernels = default_cache_folder()
    kernels.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    default_cache_folder().parent.mkdir(parents=True, exist_ok=True)
    default_cache_folder().symlink_to(kernels)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache with the compiled kernels."""
    use_cache(tmp_path / "cache", monkeypatch)
    return tmp_path / "cache"
