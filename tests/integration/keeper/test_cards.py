"""Cards of models that no worker has loaded yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.ops.demo.run import MODEL
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.keeper.cards import read_cards

from ...engines.demo_gguf import write_demo


def test_files_that_were_never_read_before_give_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first reading of a GGUF file is logged, which is not part of the reply.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, damaged = write_demo(tmp_path / "demo.gguf"), tmp_path / "damaged.gguf"
    damaged.write_bytes(file.read_bytes()[:100])
    replies = read_cards([EngineConfig(model=str(path)) for path in (file, MODEL, damaged)])
    assert [reply.card.max_model_len for reply in replies] == [2048, 2048, 0]
    assert [reply.problem for reply in replies] == [
        "",
        "",
        f"{damaged} is damaged or cut short; fetch it again",
    ]
    assert [reply.weight_bytes > 0 for reply in replies] == [True, True, False]
