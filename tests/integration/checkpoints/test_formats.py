"""A quantised checkpoint of each format is the model that it stands for, to the bit, and says the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from penstock.worker.config import EngineConfig
from penstock.worker.models.folder import resolve_model_folder
from penstock.worker.models.loader import load_module

from .conftest import MakePair
from .packing import FORMATS


def load(folder: Path, dtype: str = "float32") -> PreTrainedModel:
    config = EngineConfig(model=str(folder), dtype=dtype)
    return load_module(config, resolve_model_folder(config.model))


def assert_same(found: PreTrainedModel, wanted: PreTrainedModel) -> None:
    """Of one class, with the same weights, to the bit."""
    assert type(found) is type(wanted)
    held, asked = found.state_dict(), wanted.state_dict()
    assert held.keys() == asked.keys()
    different = [name for name, tensor in asked.items() if not torch.equal(held[name], tensor)]
    assert not different


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_is_what_it_stands_for(make_pair: MakePair, name: str) -> None:
    packed, plain = make_pair(FORMATS[name])
    assert_same(load(packed), load(plain))
