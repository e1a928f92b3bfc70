"""Write a LLaVA of a known shape with random weights: ``python -m penstock.ops.lab.random_vision_model``.

The cost of an image does not depend on the weights. The text decoder is as large as SmolLM-135M, the vision encoder as
ViT-B/16 with 336 pixels: 441 tokens per image. The tokenizer has the 256 bytes and ``<image>``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken
from transformers import AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from .random_model import byte_tokenizer

PATCH_SIZE, IMAGE_SIZE = 16, 336
IMAGE_TOKEN = "<image>"
# pyright knows only the classes that the package imports by name.
_ALL: Any = transformers


def write_random_vision_model(folder: Path, seed: int = 0) -> None:
    """Write configuration, bfloat16 weights, tokenizer and processor into ``folder``."""
    torch.manual_seed(seed)
    transformers_logging.disable_progress_bar()
    tokenizer = _tokenizer()
    config = _ALL.LlavaConfig(
        text_config=_ALL.LlamaConfig(
            hidden_size=576,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            intermediate_size=1536,
            vocab_size=512,
            max_position_embeddings=2048,
            initializer_range=576**-0.5,
            bos_token_id=None,
            eos_token_id=None,
        ),
        vision_config=_ALL.CLIPVisionConfig(
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            image_size=IMAGE_SIZE,
            patch_size=PATCH_SIZE,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        vision_feature_layer=-2,
    )
    images = _ALL.CLIPImageProcessorPil(
        size={"shortest_edge": IMAGE_SIZE}, crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    )
    processor = _ALL.LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    processor.save_pretrained(folder)


def _tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<pad>", special=True), AddedToken(IMAGE_TOKEN, special=True)])
    return _ALL.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")


def main() -> int:
    """Parse the command line and write the folder."""
    parser = argparse.ArgumentParser(prog="penstock.ops.lab.random_vision_model", description=__doc__)
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_random_vision_model(arguments.out, arguments.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
