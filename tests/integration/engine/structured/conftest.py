"""A random model that writes bytes, and engines over it with either library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from penstock.shared.messages.core import EngineCoreOutput
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import build_engine
from penstock.worker.engine.core.engine_core import EngineCore

from ..harness import BYTES_PER_TOKEN, SHAPE

NUM_PADDING = 23
BACKENDS = ("xgrammar", "llguidance")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokens are bytes and a few longer pieces, with more logits than tokens."""
    made = tmp_path_factory.mktemp("byte-model")
    special = ["<pad>", "<s>", "</s>"]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [("{", '"'), ('"', ":"), ('"', ","), ("Ġ", '"'), ("1", "2"), ("a", "b")]
    pieces += ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(made / "tokenizer.json"))
    torch.manual_seed(0)
    shape: dict[str, Any] = SHAPE | {"vocab_size": len(pieces) + NUM_PADDING, "max_position_embeddings": 1024}
    transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**shape)).save_pretrained(made)
    return made


@pytest.fixture(scope="session")
def make(folder: Path) -> Callable[..., EngineCore]:
    def make(num_blocks: int = 2000, block_size: int = 16, **options: Any) -> EngineCore:
        memory = num_blocks * block_size * BYTES_PER_TOKEN
        config = EngineConfig(
            model=str(folder), num_threads=1, kv_cache_memory=memory, block_size=block_size, **options
        )
        return build_engine(config, folder).core

    return make


@pytest.fixture(scope="session", params=BACKENDS)
def core(request: pytest.FixtureRequest, make: Callable[..., EngineCore]) -> EngineCore:
    return make(structured_outputs_backend=request.param)


@pytest.fixture(scope="session")
def text_of(folder: Path) -> Callable[[EngineCoreOutput], str]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda output: tokenizer.decode(output.new_token_ids)
