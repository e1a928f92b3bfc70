"""A keeper of weights that cannot give them to its children says why, and a core without a keeper inherits nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from penstock.ops.demo.run import MODEL
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine import keeper


def config_of(model: Path) -> EngineConfig:
    return EngineConfig(model=str(model), device="cpu", num_threads=1)


def test_a_keeper_with_threads_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "_END_OF_THREADS_S", 0.0)
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    try:
        assert "of which a core would lack all but one" in keeper.keep_weights(config_of(MODEL))
    finally:
        ended.set()
        other.join()
    assert keeper.inherited_model(config_of(MODEL)) is None


def test_a_keeper_without_a_model_refuses(tmp_path: Path) -> None:
    assert "has loaded no model" in keeper.keep_weights(config_of(tmp_path / "none"))
