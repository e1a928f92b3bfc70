"""A processor for models whose own one needs torchvision only for videos: Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

What makes their pixels is transformers' image processor for Pillow and numpy. What the whole processor adds for images
is a placeholder for each merged patch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from PIL import Image


class GridProcessor:
    """Called as transformers' processors are, for images without text.

    Args:
        images: transformers' image processor; its ``merge_size`` squared patches are one token.
    """

    def __init__(self, images: Any, image_token: str, image_token_id: int) -> None:
        self._images = images
        self.image_token = image_token
        self.image_token_id = image_token_id

    @classmethod
    def load(cls, folder: Path, image_token_id: int, *, trust_remote_code: bool) -> GridProcessor:
        """Load its parts from the model's folder. Raises whatever transformers does."""
        from transformers import AutoTokenizer
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        images = AutoImageProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        return cls(images, tokenizer.convert_ids_to_tokens(image_token_id), image_token_id)

    def __call__(self, *, images: list[Image.Image], **_: Any) -> dict[str, Any]:
        """Return the tensors for the tower, and ``input_ids`` ``[1, T]`` with a placeholder for each token."""
        made = dict(self._images(images, return_tensors="pt"))
        num_tokens = int(made["image_grid_thw"].prod(-1).sum()) // self._images.merge_size**2
        return {"input_ids": torch.full((1, num_tokens), self.image_token_id), **made}
