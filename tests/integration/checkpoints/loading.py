"""Models of folders and files, as engines load them, and what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.pooling import PoolingParams
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import build_engine
from penstock.worker.models.checkpoint.folder import resolve_model_folder
from penstock.worker.models.loading.loader import load_module

PROMPT = list(range(5, 20))


def load(model: Path, dtype: str = "float32") -> PreTrainedModel:
    config = EngineConfig(model=str(model), dtype=dtype)
    return load_module(config, resolve_model_folder(config.model))


def assert_same(found: PreTrainedModel, wanted: PreTrainedModel) -> None:
    """Check that both models have one class and the same bits as weights."""
    assert type(found) is type(wanted)
    held, asked = found.state_dict(), wanted.state_dict()
    assert held.keys() == asked.keys()
    different = [name for name, tensor in asked.items() if not torch.equal(held[name], tensor)]
    assert not different


def tokens(model: Path, **options: Any) -> list[int]:
    """Return what an engine answers."""
    config = EngineConfig(
        **{"model": str(model), "dtype": "float32", "num_threads": 1, "kv_cache_memory": 1 << 22, **options}
    )
    core = build_engine(config, resolve_model_folder(config.model)).core
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    assert core.add_request(EngineCoreRequest(request_id="1", prompt_token_ids=PROMPT, sampling_params=params)) is None
    said: list[int] = []
    while core.has_work:
        for output in core.step_fn():
            assert output.error is None
            said += output.new_token_ids
    return said


def embedding(model: Path) -> torch.Tensor:
    """Return the embedding of the prompt by an engine."""
    config = EngineConfig(model=str(model), dtype="float32", num_threads=1)
    core = build_engine(config, resolve_model_folder(config.model)).core
    request = EngineCoreRequest(request_id="1", prompt_token_ids=PROMPT, pooling_params=PoolingParams())
    assert core.add_request(request) is None
    outputs: list[EngineCoreOutput] = []
    while core.has_work:
        outputs += core.step_fn()
    pooled = outputs[-1].pooled
    assert pooled is not None
    return torch.frombuffer(bytearray(pooled.data), dtype=torch.float32)
