# pyright: reportMissingImports=false
# (gguf and numpy are installed with llama.cpp, in its own environment.)
"""A model folder of transformers' as a GGUF file, its matrices in bfloat16 or float32.

Llama and Qwen3 shapes, which differ in how rotation pairs the dimensions of a head: llama.cpp's "llama" pairs
neighbours where transformers pairs halves, so the rows of its query and key projections are put in that order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_ARCHITECTURES = {"LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA, "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3}


def write_gguf(folder: Path, path: Path, dtype: str) -> None:
    """Write the model in ``folder`` to ``path``, its matrices in ``dtype``, without a vocabulary.

    Raises:
        KeyError: the architecture is none of the two, or a tensor's name or type has none in GGUF.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = _ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _write_parameters(writer, config, gguf.LlamaFileType.MOSTLY_BF16 if dtype == "bfloat16" else None)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    permutes = architecture == gguf.MODEL_ARCH.LLAMA
    for name, tensor in _tensors(folder / "model.safetensors"):
        if permutes and ".self_attn.q_proj." in name:
            tensor = _interleave(tensor, config["num_attention_heads"])
        if permutes and ".self_attn.k_proj." in name:
            tensor = _interleave(tensor, config["num_key_value_heads"])
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        if gguf_name is None:
            raise KeyError(f"{name} has no name in GGUF")
        if dtype == "bfloat16" and tensor.ndim > 1:
            # Exact: they were stored so, and numpy has no bfloat16 of its own.
            bits = (np.ascontiguousarray(tensor).view(np.uint32) >> 16).astype(np.uint16)
            writer.add_tensor(gguf_name, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(gguf_name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_parameters(writer: Any, config: dict[str, Any], file_type: Any) -> None:
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    if file_type is not None:
        writer.add_file_type(file_type)


def _tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Name and values, in float32, of every tensor of a safetensors file of bfloat16 or float32."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    (header_size,) = struct.unpack("<Q", data[:8].tobytes())
    header = json.loads(data[8 : 8 + header_size].tobytes())
    header.pop("__metadata__", None)
    for name, entry in header.items():
        start, end = (8 + header_size + offset for offset in entry["data_offsets"])
        raw = data[start:end].tobytes()
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] == "F32":
            values = np.frombuffer(raw, np.float32)
        else:
            raise KeyError(f"{name} is {entry['dtype']}; only bfloat16 and float32 are converted")
        yield name, values.reshape(entry["shape"])


def _interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from (first halves, second halves) to neighbours: ``[H * D, hidden]`` in and out."""
    rows, hidden = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, hidden)
    return halves.swapaxes(1, 2).reshape(rows, hidden)
