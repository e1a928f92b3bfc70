"""Small random models that pool, in folders, and what transformers makes of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import PreTrainedModel

from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.pooling import PoolingParams
from penstock.worker.engine.core.engine_core import EngineCore

VOCAB_SIZE = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
DISTILLED: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4}
DECODER = {**SHAPE, "num_key_value_heads": 2, "pad_token_id": 0}
_MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
# A window of three tokens to each side in two layers of three.
MODERN = {**SHAPE, **_MARKS, "local_attention": 6, "global_attn_every_n_layers": 3}
# name -> class, fields of its config, and which token's hidden state is the embedding.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", {**DECODER, "head_dim": 16}),
    "llama, without a head": ("LlamaModel", DECODER),
    "gemma2, which caps its logits": (
        "Gemma2Model",
        {**DECODER, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9},
    ),
    "llama, three classes": ("LlamaForSequenceClassification", {**DECODER, "num_labels": 3}),
    "bert": ("BertModel", SHAPE),
    "bert, three classes": ("BertForSequenceClassification", {**SHAPE, "num_labels": 3}),
    "bert, classes of tokens": ("BertForTokenClassification", {**SHAPE, "num_labels": 3}),
    "roberta": ("RobertaModel", SHAPE),
    "roberta, normalised before each part": ("RobertaPreLayerNormModel", SHAPE),
    "distilbert": ("DistilBertModel", {**DISTILLED, "max_position_embeddings": 64, "initializer_range": 0.3}),
    "electra, narrow embeddings": ("ElectraModel", {**SHAPE, "embedding_size": 32}),
    "albert, layers that share weights": ("AlbertModel", {**SHAPE, "embedding_size": 32}),
    "nomic, rotated and gated": ("NomicBertModel", {**SHAPE, "intermediate_size": 128}),
    "jina": ("JinaEmbeddingsV3Model", SHAPE),
    "xlm-roberta, one class": ("XLMRobertaForSequenceClassification", {**SHAPE, "num_labels": 1, "type_vocab_size": 1}),
    "modernbert": ("ModernBertModel", MODERN),
    "modernbert, classes by the mean": (
        "ModernBertForSequenceClassification",
        {**MODERN, "num_labels": 2, "classifier_pooling": "mean"},
    ),
}


def make_model(folder: Path, name: str, **changed: Any) -> PreTrainedModel:
    """Write the model into ``folder``, and return it."""
    kind, fields = MODELS[name]
    cls = getattr(transformers, kind)
    torch.manual_seed(1)
    module = cls(cls.config_class(**{**fields, **changed}, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:  # biases, and norms, which begin as zeros and ones
                parameter.add_(torch.randn_like(parameter) * 0.3)
    module.save_pretrained(folder)
    vocabulary = {f"<{i}>": i for i in range(VOCAB_SIZE)}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<0>"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return module


def as_sentence_transformers(folder: Path, mode: str, *, normalize: bool, **told: Any) -> None:
    """Write the files of sentence-transformers beside the model."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, mode: True}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(told))


def request(request_id: str, prompt: list[int], **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id, prompt_token_ids=prompt, pooling_params=PoolingParams(**params), tenant="t"
    )


def pool(core: EngineCore, requests: list[EngineCoreRequest]) -> dict[str, EngineCoreOutput]:
    """Run requests together to their end; the last word about each."""
    ended: dict[str, EngineCoreOutput] = {}
    for one in requests:
        assert core.add_request(one) is None
    while core.has_work:
        for output in core.step_fn():
            assert output.request_id not in ended
            ended[output.request_id] = output
        core.check_invariants()
    return ended


def array_of(output: EngineCoreOutput) -> NDArray[np.float32]:
    assert output.error is None, output.error
    assert output.pooled is not None
    return np.frombuffer(output.pooled.data, "<f4").reshape(output.pooled.shape)


def cosine(ours: NDArray[np.float32], theirs: NDArray[Any]) -> float:
    a, b = ours.ravel().astype(np.float64), theirs.ravel().astype(np.float64)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
