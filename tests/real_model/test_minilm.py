"""all-MiniLM-L6-v2: embeddings as transformers computes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.pooling import PoolingParams
from penstock.worker.text.tokenizer import TextCodec

from .conftest import engine_of
from .texts import SENTENCES

# In one lane, since an engine takes a gigabyte.
pytestmark = [pytest.mark.real_model, pytest.mark.xdist_group("real_model")]


@torch.inference_mode()
def embeddings_by_transformers(folder: Path, prompts: list[list[int]]) -> np.ndarray:
    """Return the normalised means of the last hidden states, as the folder's ``modules.json`` says."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    means = [model(torch.tensor([token_ids])).last_hidden_state[0].mean(0) for token_ids in prompts]
    return torch.nn.functional.normalize(torch.stack(means)).numpy()


def test_embeddings_are_those_of_transformers(minilm: Path) -> None:
    codec = TextCodec.load(minilm)
    prompts = [codec.encode(sentence) for sentence in SENTENCES]
    vectors: dict[str, np.ndarray] = {}
    with engine_of(minilm, dtype="float32") as engine:
        for index, token_ids in enumerate(prompts):
            request = EngineCoreRequest(
                request_id=str(index), prompt_token_ids=token_ids, pooling_params=PoolingParams()
            )
            assert engine.core.add_request(request) is None
        while engine.core.has_work:
            for output in engine.core.step_fn():
                assert output.pooled is not None, output.error
                vectors[output.request_id] = np.frombuffer(output.pooled.data, "<f4")
    ours = np.stack([vectors[str(index)] for index in range(len(prompts))])
    assert ours == pytest.approx(embeddings_by_transformers(minilm, prompts), abs=1e-5)
    # The first two pairs of sentences say the same.
    likeness = ours @ ours.T
    assert likeness[0, 1] > 0.5 > likeness[0, 2]
    assert likeness[2, 3] > 0.4 > likeness[2, 4]
