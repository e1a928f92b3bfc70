"""A model's own image processor: from images to the tensors of the vision encoder and the tokens of the prompt.

A processor writes an image's tokens into the text, and then tokenizes the whole. Where an image begins or ends with
line breaks, as Gemma's do, these may become one token with the line breaks of the surrounding text.

Qwen's models rotate queries and keys by positions in three axes: time, rows and columns. A text token has the same
position in all three. Tokens of an image have the position of their patch, counted from the start of the image; text
after it continues after the longer side. So positions are fewer than tokens, and those of generated tokens lag behind
by the difference.

Two kinds of processors are ours, because transformers' own need torchvision, which they use for videos only.
``GridProcessor`` serves Qwen2-VL, Qwen2.5-VL and Qwen3-VL: transformers' image processor for Pillow and numpy makes the
pixels, and one placeholder stands for each merged patch. ``OneVisionProcessor`` serves LLaVA-OneVision: it counts
tokens by the method of transformers' processor, which it creates without the video part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ....shared.errors import ModelLoadError, ValidationError
from ..checkpoint.wording import first_line

# Wording of transformers about missing dependencies of its image processors.
_MISSING = re.compile(r"Missing optional dependencies: (\w+)")
# pip may install a torchvision that was built for another torch; transformers then fails to load at all.
_REMEDIES = {"torchvision": f"install the one that was built for torch {torch.__version__}, from where that came"}
# Entries that processors return about texts and encoders do not take.
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")

Axes = NDArray[np.int64]
AxesOf = Callable[[Mapping[str, Tensor]], Axes]

_GRID = "image_grid_thw"
_CONFIG = "processor_config.json"


def axes_by_grid(model_config: Any) -> AxesOf:
    """Return a function from the encoder's tensors to the positions ``[3, N]`` of an image's ``N`` tokens, from 0."""
    merge = int(model_config.vision_config.spatial_merge_size)

    def axes_of(tensors: Mapping[str, Tensor]) -> Axes:
        (times, rows, columns), *_ = tensors[_GRID].tolist()
        grid = np.meshgrid(np.arange(times), np.arange(rows // merge), np.arange(columns // merge), indexing="ij")
        return np.stack([axis.ravel() for axis in grid])

    return axes_of


class TokenJoiner:
    """Joins token lists as the model's own tokenizer would tokenize the whole text.

    Args:
        tokenizer: of transformers; None if no token of an image is text.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer

    def append(self, token_ids: list[int], more: Sequence[int]) -> int:
        """Append ``more`` to ``token_ids``; return the index of its first token, or where it would be."""
        start = len(token_ids)
        replacement = self._joined(token_ids[-1], more[0]) if token_ids and more else None
        if replacement is None:
            token_ids += more
            return start
        token_ids[-1:] = replacement
        token_ids += more[1:]
        return len(token_ids) - len(more)

    def _joined(self, left: int, right: int) -> list[int] | None:
        """Return the tokens that replace ``left`` and ``right``; None if both stay."""
        if self._tokenizer is None or not (self._is_breaks(right) and self._is_breaks(left)):
            return None
        text = self._tokenizer.decode([left]) + self._tokenizer.decode([right])
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _is_breaks(self, token_id: int) -> bool:
        text = self._tokenizer.decode([token_id])
        return bool(text) and not text.strip("\n")


@dataclass(frozen=True)
class ImageTokens:
    """The tokens that represent one image in a prompt.

    Args:
        token_ids: placeholders, and the model's marks of starts, ends and lines.
        places: indices of the placeholders in ``token_ids``, ascending; each gets one row of features.
        axes: ``[3, len(token_ids)]``, positions in three axes; None if a token's index is its position.
        bidirectional: start and stop of each run of placeholders that attend to each other; empty if all attention is
            causal.
    """

    token_ids: list[int]
    places: list[int]
    axes: Axes | None = None
    bidirectional: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """An image as the model's vision encoder takes it."""

    tokens: ImageTokens
    tensors: dict[str, Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors.values())


class ImageProcessor:
    """Processes images one at a time, so that the result does not depend on other images.

    Args:
        processor: of transformers, for text and images.
        axes_of: computes positions in three axes from an image's tensors; None for ordinary positions.
        feature_token_id: the token whose embeddings are replaced by features; None if it is the token by which prompts
            name an image.
        sees_itself: adjacent placeholders attend to each other in both directions.
    """

    def __init__(
        self,
        processor: Any,
        axes_of: AxesOf | None = None,
        *,
        feature_token_id: int | None = None,
        sees_itself: bool = False,
    ) -> None:
        self._processor = processor
        self._axes_of = axes_of
        self._sees_itself = sees_itself
        self.image_token: str = processor.image_token
        self.image_token_id: int = processor.image_token_id
        self.feature_token_id: int = self.image_token_id if feature_token_id is None else feature_token_id
        self.joiner = TokenJoiner(getattr(processor, "tokenizer", None))

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        trust_remote_code: bool,
        make: Callable[[], Any] | None = None,
        axes_of: AxesOf | None = None,
        **more: Any,
    ) -> ImageProcessor:
        """Load the processor from the model's folder.

        Args:
            make: loads a replacement of transformers' own processor; None for that.
            more: arguments of the constructor.

        Raises:
            ModelLoadError: the processor is missing, or needs a package that is not installed; the message says which.
        """
        from transformers import AutoProcessor

        try:
            make = make or partial(AutoProcessor.from_pretrained, folder, trust_remote_code=trust_remote_code)
            return cls(make(), axes_of, **more)
        except Exception as error:  # OSError, ImportError, or any exception of its own code
            package = _missing_package(error)
            reason = f"it needs the package {package}; {_REMEDIES.get(package, f'pip install {package}')}"
            if not package:
                reason = f"{type(error).__name__}: {first_line(error)}"
            raise ModelLoadError(f"its image processor cannot be loaded: {reason}") from error

    def process(self, image: Image.Image) -> ProcessedImage:
        """Process ``image``, which is RGB.

        Raises:
            ValidationError: the model's processor rejects it.
        """
        try:
            inputs = self._processor(
                text=self.image_token, images=[image], return_tensors="pt", add_special_tokens=False
            )
        except Exception as error:  # for example a size that it cannot divide
            raise ValidationError(
                f"the model's processor fails on it ({image.width} by {image.height}): {first_line(error)}"
            ) from error
        token_ids = inputs["input_ids"].flatten().tolist()
        places = [place for place, token_id in enumerate(token_ids) if token_id == self.feature_token_id]
        tensors = {name: _tensor(value) for name, value in inputs.items() if name not in _OF_TEXT}
        axes = None if self._axes_of is None else self._axes_of(tensors)
        bidirectional = runs_of(places) if self._sees_itself else ()
        return ProcessedImage(ImageTokens(token_ids, places, axes, bidirectional), tensors)

    def tokens_together(self, images: list[Image.Image]) -> list[int]:
        """Return the tokens of several adjacent images, processed in one call."""
        inputs = self._processor(
            text=self.image_token * len(images), images=images, return_tensors="pt", add_special_tokens=False
        )
        return inputs["input_ids"].flatten().tolist()


def runs_of(places: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return start and stop of each run of consecutive numbers in ``places``, which ascend."""
    breaks = [at for at in range(1, len(places)) if places[at] != places[at - 1] + 1]
    starts, stops = [0, *breaks], [*breaks, len(places)]
    return tuple((places[start], places[stop - 1] + 1) for start, stop in zip(starts, stops, strict=True) if places)


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def _missing_package(error: BaseException) -> str:
    """Return the package whose absence caused ``error``; "" if the cause is another."""
    missing = _MISSING.search(str(error))
    if missing:
        return missing[1]
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            return cause.name.partition(".")[0]
        if isinstance(cause, ImportError):
            for package in ("torchvision", "num2words"):
                if package in str(cause).lower():
                    return package
        cause = cause.__cause__ or cause.__context__
    # Some processors look for video processors in a table that is empty without torchvision.
    return "torchvision" if "VIDEO_PROCESSOR_MAPPING" in str(error) else ""


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
