"""Pictures, prompts and the outputs of transformers for them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from .processors import PLACEHOLDER, QwenLike, StandIn


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """Noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    """``image`` as a file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def load_by_transformers(folder: Path) -> Any:
    """Load a vision model with transformers."""
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()


def by_transformers(
    model: Any, processor: Any, prompt: list[int], images: list[Image.Image], num_tokens: int
) -> list[int]:
    """Return the greedy output of ``load_by_transformers``'s ``model`` for a prompt with placeholders."""
    if not images:
        inputs: Any = {
            "input_ids": torch.tensor([prompt]),
            "attention_mask": torch.ones(1, len(prompt), dtype=torch.int),
        }
    elif isinstance(processor, StandIn):
        features = processor(images=images)
        expanded, lines = [], [processor(images=[image])["input_ids"][0].tolist() for image in images]
        for token_id in prompt:
            expanded += lines.pop(0) if token_id == PLACEHOLDER else [token_id]
        inputs = {**features, "input_ids": torch.tensor([expanded])}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if isinstance(processor, QwenLike):
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == PLACEHOLDER).int()
    else:
        text = processor.tokenizer.decode(prompt, skip_special_tokens=False)
        inputs = processor(text=text, images=images, return_tensors="pt", add_special_tokens=False)
    out = model.generate(
        **inputs, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=256,
    )  # fmt: skip
    return out[0, inputs["input_ids"].shape[1] :].tolist()
