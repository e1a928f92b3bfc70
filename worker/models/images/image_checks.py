"""Checks of a loaded model with images: the whole model against its text decoder with features for placeholders."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor, nn

from ....shared.errors import ModelLoadError
from ..checkpoint.wording import first_line
from ..checks.conformance import tolerance_of
from ..checks.lengths import lowered
from ..forward import VisionInputs
from .model_parts import VisionEncoder
from .processor import ImageProcessor, ProcessedImage, runs_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Model types whose encoders take the tiles of a whole prompt in one row; others take one row per image.
_TILES_OF_A_PROMPT = frozenset({"idefics3", "smolvlm"})
_PROBED_SIZES = ((97, 61), (40, 112))
_PROBED_TEXT = 5
# Models treat images specially only in their first layers, and all layers of a large model take minutes on a CPU.
_PROBED_LAYERS = 4
# Names of the argument that marks the tokens of images.
_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")


def verify_text(module: PreTrainedModel, text: PreTrainedModel, vocab_size: int) -> None:
    """Compare the logits of a prompt without images. Some models scale their logits, and their text models do not."""
    input_ids = torch.tensor([_words(vocab_size, None)[:_PROBED_TEXT]], device=module.device)
    with _shallow(text.base_model):
        theirs, ours = (model(input_ids=input_ids, use_cache=False).logits[0].float() for model in (module, text))
    if (worst := _error(ours, theirs)) > tolerance_of(module.dtype):
        raise ModelLoadError(
            f"{type(module).__name__} cannot be served: as {type(text).__name__} it gives other logits, by {worst:.1%}"
        )


def processes_each_alone(processor: ImageProcessor) -> bool:
    """Whether two images in one call get the tokens that each gets alone. LLaVA-OneVision tiles only a single image."""
    pictures = [picture(*size) for size in _PROBED_SIZES]
    alone: list[int] = []
    for image in pictures:
        processor.joiner.append(alone, processor.process(image).tokens.token_ids)
    return processor.tokens_together(pictures) == alone


def longest_bidirectional(processor: ImageProcessor) -> int:
    """Return the most tokens of an image that attend to each other; 0 if attention is causal."""
    runs_of_images = [processor.process(picture(*size)).tokens.bidirectional for size in _PROBED_SIZES]
    return max((stop - start for runs in runs_of_images for start, stop in runs), default=0)


def verify_images(module: PreTrainedModel, text: PreTrainedModel, processor: ImageProcessor, vocab_size: int) -> None:
    """Compare the logits of a prompt with two images.

    Raises:
        ModelLoadError: they differ by more than rounding, or the model fails.
    """
    try:
        images = [processor.process(picture(*size)) for size in _PROBED_SIZES]
        if any(_is_bare(image) for image in images):
            raise ValueError("the tokens of adjacent images would attend to each other")
        input_ids, places, axes = _prompt(images, vocab_size, processor)
        input_ids = input_ids.to(module.device)
        encoder = VisionEncoder(module.model)
        embeds = text.get_input_embeddings()(input_ids)
        features = torch.cat([encoder.encode(image) for image in images]).to(embeds)
        embeds[0, places], *deeper = features.split(embeds.shape[-1], dim=1)
        vision_inputs = VisionInputs(axes, torch.tensor(places, device=module.device), tuple(deeper)).arguments(
            input_ids.shape[1]
        )
        whole_inputs = _together(module, images) | _of_tokens(module, input_ids, processor.feature_token_id)
        with _shallow(text.base_model), lowered(text):
            if any(image.tokens.bidirectional for image in images):
                vision_inputs["attention_mask"] = _masks(text, places, input_ids.shape[1])
            theirs = module(input_ids=input_ids, use_cache=False, **whole_inputs).logits[0].float()
            ours = text(inputs_embeds=embeds, use_cache=False, **vision_inputs).logits[0].float()
    except Exception as error:  # any exception of the architecture's own code
        raise ModelLoadError(f"a picture cannot be tried out: {type(error).__name__}: {first_line(error)}") from error
    if (worst := _error(ours, theirs)) > tolerance_of(module.dtype):
        raise ModelLoadError(
            f"features in place of placeholders give other results than the model alone: logits differ by {worst:.1%}"
        )


def _is_bare(image: ProcessedImage) -> bool:
    """Whether no token separates the bidirectional runs of two adjacent images of this kind."""
    runs = image.tokens.bidirectional
    return bool(runs) and runs[0][0] == 0 and runs[-1][1] == len(image.tokens.token_ids)


def _prompt(
    images: list[ProcessedImage], vocab_size: int, processor: ImageProcessor
) -> tuple[Tensor, list[int], Tensor | None]:
    """Build a prompt of text, image, text, image, text.

    Returns its token ids ``[1, T]``, the indices of the placeholders, and positions ``[3, T]`` if they have three axes.
    """
    words = _words(vocab_size, processor)
    token_ids, places = words[:_PROBED_TEXT], []
    axes, position = [_text_axes(0)], _PROBED_TEXT
    for number, image in enumerate(images, start=1):
        places += [len(token_ids) + place for place in image.tokens.places]
        token_ids += image.tokens.token_ids + words[number * _PROBED_TEXT : (number + 1) * _PROBED_TEXT]
        if image.tokens.axes is not None:
            image_axes = torch.from_numpy(image.tokens.axes) + position
            position = int(image_axes.max()) + 1 + _PROBED_TEXT
            axes += [image_axes, _text_axes(position - _PROBED_TEXT)]
    return torch.tensor([token_ids]), places, torch.cat(axes, dim=1) if len(axes) > 1 else None


def _text_axes(start: int) -> Tensor:
    return torch.arange(start, start + _PROBED_TEXT).expand(3, -1)


def _of_tokens(module: PreTrainedModel, input_ids: Tensor, image_token_id: int) -> dict[str, Tensor]:
    """Return the argument that marks the tokens of images, if the model takes one."""
    parameters = inspect.signature(module.model.forward).parameters
    return {name: (input_ids == image_token_id).int() for name in _TOKEN_TYPES if name in parameters}


def _masks(text: PreTrainedModel, places: list[int], num_tokens: int) -> dict[str, Tensor]:
    """Return additive masks ``[1, 1, T, T]`` per kind of layer, in which runs of ``places`` attend to each other."""
    queries = torch.arange(num_tokens, device=text.device)[:, None]
    ends = queries + 1
    for start, stop in runs_of(places):
        ends[start:stop] = stop
    keys = queries.T
    kinds = {"full_attention": keys < ends}
    kinds["sliding_attention"] = kinds["full_attention"] & (keys > queries - (text.config.sliding_window or num_tokens))
    lowest = torch.finfo(text.dtype).min
    return {
        kind: torch.zeros(is_visible.shape, dtype=text.dtype, device=text.device).masked_fill_(~is_visible, lowest)[
            None, None
        ]
        for kind, is_visible in kinds.items()
    }


def _words(vocab_size: int, processor: ImageProcessor | None) -> list[int]:
    not_words = () if processor is None else (processor.image_token_id, processor.feature_token_id)
    return [word for word in range(1, vocab_size) if word not in not_words][: 3 * _PROBED_TEXT]


def _error(ours: Tensor, theirs: Tensor) -> float:
    """Return the median over tokens of the relative difference."""
    errors = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-6)
    return errors.nan_to_num(torch.inf).median().item()


def _together(module: PreTrainedModel, images: list[ProcessedImage]) -> dict[str, Tensor]:
    """Return the tensors of several images as arguments of one call of the model's ``forward``."""
    arguments: dict[str, Tensor] = {}
    for name in images[0].tensors:
        parts = [image.tensors[name] for image in images]
        axis = 1 if module.config.model_type in _TILES_OF_A_PROMPT else 0
        sizes = [max(part.shape[dim] for part in parts) for dim in range(parts[0].dim())]
        padded = [_pad(part, sizes, axis) for part in parts]
        tensor = torch.cat(padded, dim=axis)
        arguments[name] = tensor.to(module.device, module.dtype if tensor.is_floating_point() else None)
    return arguments


@contextmanager
def _shallow(decoder: Any) -> Iterator[None]:
    """Truncate ``decoder`` to its first layers, including one of each kind, within the context."""
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        yield
        return
    kinds = getattr(decoder.config, "layer_types", None) or ()
    decoder.layers = layers[: max([_PROBED_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds))])]
    try:
        yield
    finally:
        decoder.layers = layers


def _pad(part: Tensor, sizes: list[int], axis: int) -> Tensor:
    """Append zeros to ``part`` in all dimensions but ``axis``."""
    shape = [part.shape[dim] if dim == axis else size for dim, size in enumerate(sizes)]
    if list(part.shape) == shape:
        return part
    padded = part.new_zeros(shape)
    padded[tuple(slice(0, size) for size in part.shape)] = part
    return padded


def picture(width: int, height: int) -> Image.Image:
    """Return an image that is neither of one colour nor symmetric, so that no tile is empty and the order of tiles
    matters.
    """
    rows = torch.arange(height)[:, None, None] * torch.tensor([3, 5, 2])
    columns = torch.arange(width)[None, :, None] * torch.tensor([2, 1, 7])
    return Image.fromarray(((rows + columns + 31) % 256).to(torch.uint8).numpy())
