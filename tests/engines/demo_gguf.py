"""The demo model as a GGUF file in float32, with its vocabulary, as llama-server wants it."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.numpy import load_file
from transformers import LlamaConfig

from penstock.ops.demo.run import MODEL

from ..integration.checkpoints.gguf_models import gguf_name, interleaved, values_of
from ..integration.checkpoints.gguf_writer import Blocks, plain, write_gguf

_NORMAL, _CONTROL = 1, 3


def write_demo(path: Path) -> Path:
    """Write it to ``path``, with its chat template."""
    config = LlamaConfig.from_pretrained(MODEL)
    heads = {"attn_q.": config.num_attention_heads, "attn_k.": config.num_key_value_heads}
    tensors: dict[str, Blocks] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, weight in load_file(MODEL / "model.safetensors").items():
        target = gguf_name(name)
        count = next((count for part, count in heads.items() if part in target), None)
        if weight.ndim == 1:
            tensors[target], shapes[target] = plain("F32", weight[None]), weight.shape
        else:
            tensors[target] = plain("F32", interleaved(weight, count) if count else weight)
    return write_gguf(path, {**values_of(config, "llama"), **_vocabulary()}, tensors, shapes)


def _vocabulary() -> dict[str, object]:
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        # How text is cut before it is encoded: of no account here, where the worker encodes.
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_CONTROL if token in special else _NORMAL for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": (MODEL / "chat_template.jinja").read_text(),
    }
