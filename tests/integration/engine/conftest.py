"""Small random models in folders, engines over them, and engine cores in processes of their own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import Engine, build_engine
from penstock.worker.engine.core.engine_core import EngineCore

from ...native_library import compiled
from .harness import (
    BYTES_PER_TOKEN,
    LARGE,
    MODELS,
    VOCAB_SIZE,
    CoreProcess,
    Gate,
    MakeEngine,
    write_gated_model,
)

__all__ = ["compiled"]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Keep torch off the other cores: the models are tiny."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make a folder with a random model of an architecture; the same folder for the same name."""
    root = tmp_path_factory.mktemp("models")

    def make(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            torch.manual_seed(0)
            transformers.AutoModelForCausalLM.from_config(MODELS[name]()).save_pretrained(folder)
            vocabulary = {f"<{i}>": i for i in range(VOCAB_SIZE)}
            tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<0>"}}
            (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        return folder

    return make


@pytest.fixture(scope="session")
def make_core(model_folder: Callable[[str], Path]) -> Callable[..., EngineCore]:
    """Build an engine core in this process: ``make_core("llama", num_blocks=30, block_size=4)``."""

    def make(name: str, num_blocks: int | None = None, **options: Any) -> EngineCore:
        block_size = options.get("block_size", 16)
        memory = None if num_blocks is None else num_blocks * block_size * BYTES_PER_TOKEN
        folder = model_folder(name)
        config = EngineConfig(model=str(folder), num_threads=1, kv_cache_memory=memory, **options)
        return build_engine(config, folder).core

    return make


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Prompts of different lengths."""
    rng = random.Random(0)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (3, 1, 17, 40, 9, 25)]


@pytest.fixture
def core_process() -> Iterator[CoreProcess]:
    process = CoreProcess()
    yield process
    process.process.kill()
    process.close()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.open()


@pytest.fixture
def gated_model(gate: Gate, demo_model: Path, tmp_path: Path) -> Path:
    """The demo model, which stands still at ``gate`` when it first meets token 5. Wants ``trust_remote_code``."""
    return write_gated_model(tmp_path / "gated", demo_model, gate)


@pytest.fixture
def packed_model(model_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model with packed and plain linear layers, tied embeddings, and biases."""
    folder = tmp_path / "model"
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**{**LARGE, "tie_word_embeddings": True})
    module = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    module.save_pretrained(folder)
    (folder / "tokenizer.json").write_text((model_folder("qwen2") / "tokenizer.json").read_text())
    return folder


@pytest.fixture
def make_engine(packed_model: Path, tmp_path: Path) -> MakeEngine:
    """Build an engine with its control in this process: ``make_engine(folder, dtype="bfloat16")``."""

    def make(folder: Path = packed_model, **options: Any) -> Engine:
        small: dict[str, Any] = {"num_threads": 1, "max_num_seqs": 4, "kv_cache_memory": 1 << 22, **options}
        return build_engine(EngineConfig(model=str(folder), profile_dir=str(tmp_path / "profiles"), **small), folder)

    return make
