"""The architectures of GGUF files that read texts as a whole, and how such files pool tokens."""

from __future__ import annotations

from typing import Any

from .families import Architecture, Family, Place

# By ggml's numbers; 0 is none, and 4 is for files of rerankers.
_POOLING = {1: "pooling_mode_mean_tokens", 2: "pooling_mode_cls_token", 3: "pooling_mode_lasttoken"}
_MODULES = "sentence_transformers.models"


def pooling_files(family: Family) -> dict[str, Any]:
    """Return sentence-transformers' files, by name, of a file that says how tokens become one vector; else none."""
    mode = _POOLING.get(family.value("pooling_type", 0))
    if mode is None:
        return {}
    kinds = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    return {
        "modules.json": [{"path": path, "type": f"{_MODULES}.{kind}"} for path, kind in zip(paths, kinds, strict=True)],
        "1_Pooling/config.json": {mode: True},
    }


def _of_bert(family: Family) -> dict[str, Any]:
    types = family.file.tensors.get("token_types.weight")
    return {
        "type_vocab_size": types.shape[0] if types else 1,
        # The classes want a number.
        "pad_token_id": family.file.values.get("tokenizer.ggml.padding_token_id", 0),
    }


def _of_modern_bert(family: Family) -> dict[str, Any]:
    window = family.number("attention.sliding_window")
    pattern = family.value("attention.sliding_window_pattern", 3)
    slides = pattern if isinstance(pattern, list) else [layer % pattern != 0 for layer in range(family.num_layers)]
    local = {"rope_type": "default", "rope_theta": family.real("rope.freq_base_swa", 10000.0)}
    return {
        "local_attention": window,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "rope_parameters": {"full_attention": family.rope(), "sliding_attention": local},
        "tie_word_embeddings": True,
    }


def _third(number: int, name: str) -> Place:
    """Return the place of queries, keys or values, which are the same number of rows of one tensor."""

    def rows(family: Family) -> slice:
        size = family.number("embedding_length")
        return slice(number * size, (number + 1) * size)

    return Place(f"self_attn.{name}_proj", shape=lambda _family, shape: (shape[0] // 3, *shape[1:]), rows=rows)


EMBEDDERS = {
    "bert": Architecture(
        "bert",
        "BertModel",
        layer={
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
        top={
            "token_embd": "embeddings.word_embeddings",
            "position_embd": "embeddings.position_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "token_embd_norm": "embeddings.LayerNorm",
        },
        constants={"hidden_act": "gelu"},
        norm_eps="layer_norm_eps",
        prefix="encoder.layer.",
        more=_of_bert,
    ),
    "nomic-bert": Architecture(
        "nomic_bert",
        "NomicBertModel",
        layer={
            "attn_qkv": tuple(_third(number, name) for number, name in enumerate("qkv")),
            "attn_output_norm": "post_attention_layernorm",
            "layer_output_norm": "post_mlp_layernorm",
        },
        top={
            "token_embd": "embeddings.word_embeddings",
            "token_types": "embeddings.token_type_embeddings",
            "token_embd_norm": "embeddings.LayerNorm",
        },
        norm_eps="layer_norm_eps",
        prefix="layers.",
        more=_of_bert,
    ),
    "modern-bert": Architecture(
        "modernbert",
        "ModernBertModel",
        layer={
            "attn_norm": "attn_norm",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.Wo",
            "ffn_norm": "mlp_norm",
            "ffn_up": "mlp.Wi",
            "ffn_down": "mlp.Wo",
        },
        top={
            "token_embd": "embeddings.tok_embeddings",
            "token_embd_norm": "embeddings.norm",
            "output_norm": "final_norm",
        },
        norm_eps="norm_eps",
        prefix="layers.",
        more=_of_modern_bert,
    ),
}
