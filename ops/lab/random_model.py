"""Write a model of a known shape with random weights: ``python -m penstock.ops.lab.random_model``.

Speed does not depend on the weights, so a benchmark needs no download. The tokenizer has the 256 bytes; other ids
decode to nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.utils import logging as transformers_logging

SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    # About 5M parameters, to measure everything except the model.
    "tiny": lambda: LlamaConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=704,
        vocab_size=8192,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    ),
    # all-MiniLM-L6-v2, an embedder
    "minilm": lambda: BertConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        vocab_size=30522,
        max_position_embeddings=512,
    ),
    # SmolLM-135M
    "smol135": lambda: LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    ),
    # The heads of SmolLM-135M, and almost nothing else: the time of a decoder's step is that of its attention.
    "attention135": lambda: Qwen3Config(
        hidden_size=16,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        intermediate_size=16,
        vocab_size=256,
        max_position_embeddings=2048,
    ),
    # Qwen3-0.6B
    "qwen06": lambda: Qwen3Config(
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        vocab_size=151936,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    ),
    # Qwen3-8B
    "qwen8b": lambda: Qwen3Config(
        hidden_size=4096,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=151936,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    ),
}


def write_random_model(shape: str, folder: Path, seed: int = 0) -> None:
    """Write ``config.json``, bfloat16 weights and ``tokenizer.json`` of a shape of ``SHAPES`` into ``folder``."""
    torch.manual_seed(seed)
    transformers_logging.disable_progress_bar()
    config = _config(shape)
    auto = AutoModel if isinstance(config, BertConfig) else AutoModelForCausalLM
    auto.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))


def write_model_without_weights(shape: str, folder: Path, max_model_len: int | None = None) -> None:
    """Write only ``config.json`` and ``tokenizer.json``, which ``load_format`` "dummy" reads.

    Args:
        max_model_len: positions that the model serves, instead of the shape's own; there is no weight per position.
    """
    config = _config(shape)
    config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
    if max_model_len is not None:
        config.max_position_embeddings = max_model_len
    config.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))


def _config(shape: str) -> PretrainedConfig:
    config = SHAPES[shape]()
    # No token is special, so none ends a generation: every run of a benchmark has the requested length.
    config.bos_token_id = config.eos_token_id = None
    config.dtype = torch.bfloat16
    # With the usual 0.02 and tied embeddings, a model repeats its last token forever, whatever its attention computes,
    # so engines could not be compared. At this size the layers outweigh the embedding.
    config.initializer_range = config.hidden_size**-0.5
    return config


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with only the 256 bytes, as tokens 0 to 255."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def main() -> int:
    """Parse the command line and write the folder."""
    parser = argparse.ArgumentParser(prog="penstock.ops.lab.random_model", description=__doc__)
    parser.add_argument("--shape", required=True, choices=sorted(SHAPES))
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--no-weights", action="store_true", help="for --load-format dummy, which draws random weights itself"
    )
    parser.add_argument("--max-model-len", type=int, help="positions that it serves; with --no-weights")
    arguments = parser.parse_args()
    if arguments.no_weights:
        write_model_without_weights(arguments.shape, arguments.out, arguments.max_model_len)
    else:
        write_random_model(arguments.shape, arguments.out, arguments.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
