"""What the packages make of some blocks that wrote such files: recorded in golden.json, which says by whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.worker.models.formats.declared import declared_quantization
from penstock.worker.models.formats.reading import read_plain
from penstock.worker.models.formats.tensors import StoredTensors
from penstock.worker.models.gguf.blocks import UNPACK

RECORD = json.loads((Path(__file__).parent / "golden.json").read_text())


def bits(text: str, dtype: str, shape: list[int]) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=getattr(torch, dtype)).reshape(shape)


def recorded(said: dict[str, Any]) -> torch.Tensor:
    return bits(said["bytes"], said["dtype"], said["shape"])


@pytest.mark.parametrize("kind", RECORD["gguf"])
def test_a_block_of_ggml(kind: str) -> None:
    said = RECORD["gguf"][kind]
    found = UNPACK[kind](bits(said["block"], "uint8", [1, -1]))
    assert torch.equal(found, bits(said["values"], "float32", [1, -1]))


@pytest.mark.parametrize("name", RECORD["checkpoints"])
def test_a_layer_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    said = RECORD["checkpoints"][name]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said["settings"]}))
    save_file({key: recorded(tensor) for key, tensor in said["tensors"].items()}, tmp_path / "model.safetensors")
    quantization = declared_quantization(tmp_path)
    assert quantization is not None
    wanted = recorded(said["weight"])
    tensors = read_plain(StoredTensors(tmp_path), quantization, wanted.dtype)
    assert tensors.keys() == {said["name"]}
    assert torch.equal(tensors[said["name"]][...], wanted)
