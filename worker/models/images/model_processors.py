"""Processors for models whose own processor needs torchvision, which it uses for videos only.

Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pixels come from transformers' image processor for Pillow and numpy. Besides that,
their processor only adds one placeholder per merged patch.

LLaVA-OneVision: pixels come from the same kind of image processor, and tokens are counted by the method of
transformers' processor, which is created here without its video part.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image

_CONFIG = "processor_config.json"


class GridProcessor:
    """A callable like transformers' processors, for images without text.

    Args:
        images: transformers' image processor; its ``merge_size`` squared patches are one token.
    """

    def __init__(self, images: Any, image_token: str, image_token_id: int) -> None:
        self._images = images
        self.image_token = image_token
        self.image_token_id = image_token_id

    @classmethod
    def load(cls, folder: Path, image_token_id: int, *, trust_remote_code: bool) -> GridProcessor:
        """Load the parts from the model's folder. Raises the exceptions of transformers."""
        from transformers import AutoTokenizer
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        images = AutoImageProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        return cls(images, tokenizer.convert_ids_to_tokens(image_token_id), image_token_id)

    def __call__(self, *, images: list[Image.Image], **_: Any) -> dict[str, Any]:
        """Return the tensors for the encoder, and ``input_ids`` ``[1, T]`` with a placeholder for each token."""
        tensors = dict(self._images(images, return_tensors="pt"))
        num_tokens = int(tensors["image_grid_thw"].prod(-1).sum()) // self._images.merge_size**2
        return {"input_ids": torch.full((1, num_tokens), self.image_token_id), **tensors}


class OneVisionProcessor:
    """A callable like transformers' processors, for images without text.

    Args:
        images: transformers' image processor.
        settings: content of ``processor_config.json``.
    """

    def __init__(self, images: Any, image_token: str, image_token_id: int, settings: dict[str, Any]) -> None:
        from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

        self._images = images
        self.image_token = image_token
        self.image_token_id = image_token_id
        counting: Any = object.__new__(LlavaOnevisionProcessor)
        counting.image_processor = images
        counting.image_token = image_token
        counting.num_image_tokens = settings["num_image_tokens"]
        counting.vision_feature_select_strategy = settings["vision_feature_select_strategy"]
        counting.vision_aspect_ratio = settings.get("vision_aspect_ratio", "anyres_max_9")
        self._counting = counting

    @classmethod
    def load(cls, folder: Path, image_token_id: int, *, trust_remote_code: bool) -> OneVisionProcessor:
        """Load the parts from the model's folder. Raises exceptions of transformers, ``OSError`` or ``KeyError``."""
        from transformers import AutoTokenizer
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        settings = json.loads((folder / _CONFIG).read_text())
        images = AutoImageProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        return cls(images, tokenizer.convert_ids_to_tokens(image_token_id), image_token_id, settings)

    def __call__(self, *, images: list[Image.Image], **_: Any) -> dict[str, Any]:
        """Return the tensors for the encoder, and ``input_ids`` ``[1, T]`` with a placeholder for each token."""
        tensors = dict(self._images([images], return_tensors="pt"))
        texts = (self._counting.replace_image_token(tensors, index) for index in range(len(images)))
        num_tokens = sum(text.count(self.image_token) for text in texts)
        return {"input_ids": torch.full((1, num_tokens), self.image_token_id), **tensors}
