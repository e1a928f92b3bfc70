"""An architecture that cannot be computed in any mode says so at load, by its name and with each mode's reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers

from penstock.ops.lab.survey import trial
from penstock.ops.lab.survey.small_config import small_config
from penstock.shared.errors import ModelLoadError


def refusal(config: transformers.PretrainedConfig, folder: Path, dtype: torch.dtype = torch.float32) -> str:
    trial.write_model(config, folder, dtype=dtype)
    with pytest.raises(ModelLoadError) as caught:
        trial.load(folder)
    return str(caught.value)


def test_a_model_that_keeps_nothing_is_refused(tmp_path: Path) -> None:
    """GPT-1 computes the whole sequence again for each token."""
    told = refusal(small_config("openai-gpt"), tmp_path)
    assert told.startswith("OpenAIGPTLMHeadModel cannot be served. ")
    assert "packed, split: it does not let its attention be replaced" in told
    assert "gather: it takes no transformers Cache" in told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bidirectional_model_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """Uses BERT as an encoder: a token depends on later tokens, which chunks and decodes lack."""
    config = small_config("bert")
    config.is_decoder = False
    told = refusal(config, tmp_path, dtype)
    assert told.startswith("BertLMHeadModel cannot be served. packed")
    assert re.search(r"gather: it gives other results when requests are batched: logits differ by \d+\.\d% in ", told)
