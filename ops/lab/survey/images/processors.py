"""Processors of small models, and replacements for those that need torchvision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .....worker.models.images.processor import OneVisionProcessor

# Of its classes pyright knows those that the package imports.
ALL: Any = transformers
PLACEHOLDER = 259
_SPECIAL = ("<pad>", "<s>", "</s>")


def byte_tokenizer(*placeholders: str) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of bytes; the first placeholder is ``PLACEHOLDER``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in (*_SPECIAL, *placeholders)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def gemma_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, with Gemma's marks around images, and tokens of up to four line breaks."""
    marks = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
    tokenizer: Any = byte_tokenizer(*marks.values())
    tokenizer.add_tokens([AddedToken("\n" * count, normalized=False) for count in (2, 3, 4)])
    tokenizer._set_model_specific_special_tokens(special_tokens=marks)
    return tokenizer


class StandIn:
    """In the place of a processor that needs torchvision, around the part of it that does not."""

    image_token, image_token_id = "[IMG]", PLACEHOLDER

    def __call__(self, *, images: list[Image.Image], **_: Any) -> dict[str, Any]:
        raise NotImplementedError


class PixtralLike(StandIn):
    """``PixtralProcessor``."""

    def __init__(self, patch_size: int, tokens_per_side: int) -> None:
        self._images = ALL.PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size=patch_size)
        self._pixels = patch_size
        self._size = tokens_per_side

    def __call__(self, *, images: list[Image.Image], **_: Any) -> dict[str, Any]:
        features = dict(self._images(images, return_tensors="pt", patch_size=self._pixels))
        token_ids: list[int] = []
        for height, width in features["image_sizes"]:
            rows = int(height) // self._pixels
            columns = int(width) // self._pixels
            token_ids += ([PLACEHOLDER] * columns + [PLACEHOLDER + 1]) * rows
            token_ids[-1] = PLACEHOLDER + 2
        return {"input_ids": torch.tensor([token_ids]), **features}


class InternVLLike(StandIn):
    """``InternVLProcessor``: four tokens a tile, between two that are none."""

    def __init__(self) -> None:
        size = {"height": 16, "width": 16}
        self._images = ALL.GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, max_patches=4)

    def __call__(self, *, images: list[Image.Image], **_: Any) -> dict[str, Any]:
        features = dict(self._images(images, return_tensors="pt"))
        token_ids: list[int] = []
        for num_tiles in features.pop("num_patches"):
            token_ids += [PLACEHOLDER + 1, *[PLACEHOLDER] * (4 * int(num_tiles)), PLACEHOLDER + 2]
        return {"input_ids": torch.tensor([token_ids]), **features}


class PartsAlone(StandIn):
    """A replacement for a processor that needs torchvision only for videos. An engine builds its own from it."""

    images: Any

    def save_settings(self, folder: Path) -> None:
        """Write the files of the folder other than the parts."""


class QwenLike(PartsAlone):
    """``Qwen2_5_VLProcessor``."""

    image_token = "<|image_pad|>"

    def __init__(self, patch_size: int) -> None:
        self.images = ALL.Qwen2VLImageProcessorPil(
            patch_size=patch_size, merge_size=2, size={"shortest_edge": 64, "longest_edge": 1024}
        )

    def __call__(self, *, images: list[Image.Image], **_: Any) -> dict[str, Any]:
        features = dict(self.images(images, return_tensors="pt"))
        num_tokens = int(features["image_grid_thw"].prod(-1).sum()) // 4
        return {"input_ids": torch.full((1, num_tokens), PLACEHOLDER), **features}


class GlmLike(QwenLike):
    """Replacement for ``Glm4vProcessor``, also of ``glm46v`` and ``glm_ocr``, which compute equal pixels."""

    image_token = "<|image|>"

    def __init__(self, patch_size: int) -> None:
        self.images = ALL.Glm4vImageProcessorPil(
            patch_size=patch_size, merge_size=2, size={"shortest_edge": 128, "longest_edge": 2048}
        )


class OneVisionLike(PartsAlone):
    """``LlavaOnevisionProcessor``."""

    image_token = "<image>"
    _SETTINGS: ClassVar = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}

    def __init__(self, images: Any) -> None:
        self.images = images
        self._own = OneVisionProcessor(images, self.image_token, PLACEHOLDER, self._SETTINGS)

    def save_settings(self, folder: Path) -> None:
        (folder / "processor_config.json").write_text(json.dumps(self._SETTINGS))

    def __call__(self, *, images: list[Image.Image], **_: Any) -> dict[str, Any]:
        return self._own(images=images)
