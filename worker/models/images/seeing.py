"""Which models are served with images, tried out on the loaded model.

Those of ``FAMILIES`` put an image's features in place of placeholders, and compute with them as with any embeddings;
those of ``ON_A_GRID`` besides with positions in three axes, and with features for deeper layers. It is verified: the
model alone, with two pictures, has to give the logits that its text model gives with their features. Others look at
images in more ways (masks) and are served as before: their text models, without images.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from ....shared.errors import ModelLoadError
from ....shared.params.images import MAX_IMAGES
from ..checkpoint.errors import first_line
from ..conformance import tolerance_of
from ..forward import Forward, Sight
from .axes import axes_by_grid
from .processor import ImageProcessor, ProcessedImage
from .tower import ImageTower, take_tower, text_module

ON_A_GRID = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
FAMILIES = ON_A_GRID | frozenset(
    {
        "idefics3",
        "internvl",
        "lfm2_vl",
        "llava",
        "llava_next",
        "llava_onevision",
        "mistral3",
        "smolvlm",
        "vipllava",
    }
)
# What is missing for others that many know.
_REASONS = {
    "gemma3": "the tokens of an image see each other there, which needs masks of their own",
    "gemma4": "the tokens of an image see each other there, which needs masks of their own",
    "glm4v": "its images need positions in three axes",
}
# Whose towers take the tiles of a prompt in one row; others take those of an image so.
_TILES_OF_A_PROMPT = frozenset({"idefics3", "smolvlm"})
_PROBED_SIZES = ((97, 61), (40, 112))
_PROBED_TEXT = 5
# Larger ones are made smaller by most processors.
_LARGE_SIDE = 2048
# Whatever else a model does with images, it does in the first layers; those of a large one take minutes on a CPU.
_PROBED_LAYERS = 4

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class SeeingModel:
    """What a model needs to see: its tower and its processor.

    Args:
        most_images: of a request. A processor may make something else of several than of each alone; then it is one.
        needs_sight: images are more than embeddings to it (``forward.Sight``).
    """

    tower: ImageTower
    processor: ImageProcessor
    most_images: int = MAX_IMAGES
    needs_sight: bool = False

    def profile(self) -> None:
        """Compute a large image, to see what memory the tower takes."""
        self.tower.encode(self.processor.process(_picture(_LARGE_SIDE, _LARGE_SIDE)))


class SplitModel(NamedTuple):
    """A loaded model in its parts.

    Args:
        text: what speaks.
        seeing: what sees; None if it is not to, or cannot.
        refusal: why no images are taken.
    """

    text: PreTrainedModel
    seeing: SeeingModel | None
    refusal: str


def is_seeing_type(model_config: PretrainedConfig) -> bool:
    """Whether a model of this configuration is loaded with its tower."""
    return model_config.model_type in FAMILIES


def refusal_of(model_config: PretrainedConfig) -> str:
    """Why a model that is not of ``FAMILIES`` takes no images."""
    model_type = model_config.model_type
    reason = _REASONS.get(model_type)
    if reason is not None:
        return f"images of {model_type} are not served by this version: {reason}"
    if getattr(model_config, "vision_config", None) is not None:
        return f"images of {model_type} are not served by this version, only its text"
    return "this model reads no images"


@torch.inference_mode()
def split_model(
    module: PreTrainedModel, folder: Path, vocab_size: int, *, wants_images: bool, trust_remote_code: bool
) -> SplitModel:
    """Part a model of ``FAMILIES`` into what speaks and what sees, and verify that together they are the model.

    Raises:
        ModelLoadError: what speaks cannot be had, or is not what it is in the whole.
    """
    text = text_module(module)
    _verify_text(module, text, vocab_size)
    if not wants_images:
        take_tower(module)
        return SplitModel(text, None, "this engine was started without images (max_images 0)")
    try:
        processor = _load_processor(module.config, folder, trust_remote_code=trust_remote_code)
        _verify_images(module, text, processor, vocab_size)
    except ModelLoadError as error:
        log.warning("images_refused", architecture=type(module).__name__, reason=str(error))
        take_tower(module)
        return SplitModel(text, None, f"this engine reads no images: {error}")
    most_images = MAX_IMAGES if _processes_each_alone(processor) else 1
    needs_sight = module.config.model_type in ON_A_GRID
    return SplitModel(text, SeeingModel(take_tower(module), processor, most_images, needs_sight), "")


def refusal_of_forward(seeing: SeeingModel, forward: Forward, *, is_deterministic: bool) -> str:
    """Why a model cannot see with the way in which it is computed; "" if it can."""
    if not seeing.needs_sight:
        return ""
    if forward.mode != "packed":
        return f"its images need positions in three axes, which {forward.mode} forwards do not compute with"
    if is_deterministic:
        return "its images need positions in three axes, which --deterministic does not compute with"
    return ""


def _load_processor(model_config: PretrainedConfig, folder: Path, *, trust_remote_code: bool) -> ImageProcessor:
    if model_config.model_type not in ON_A_GRID:
        return ImageProcessor.load(folder, trust_remote_code=trust_remote_code)
    image_token_id: int = getattr(model_config, "image_token_id")  # noqa: B009  # theirs have it
    axes_of = axes_by_grid(model_config)
    return ImageProcessor.load(
        folder, trust_remote_code=trust_remote_code, axes_of=axes_of, grid_token_id=image_token_id
    )


def _verify_text(module: PreTrainedModel, text: PreTrainedModel, vocab_size: int) -> None:
    """Compare the logits of a prompt without pictures. Some models scale them, and their text models do not."""
    input_ids = torch.tensor([_words(vocab_size, None)[:_PROBED_TEXT]], device=module.device)
    with _shallow(text.base_model):
        theirs, ours = (each(input_ids=input_ids, use_cache=False).logits[0].float() for each in (module, text))
    if (worst := _error(ours, theirs)) > tolerance_of(module.dtype):
        raise ModelLoadError(
            f"{type(module).__name__} cannot be served: as {type(text).__name__} it gives other logits, by {worst:.1%}"
        )


def _processes_each_alone(processor: ImageProcessor) -> bool:
    """Whether two images together have the tokens that each has alone. LLaVA-OneVision cuts only a single one up."""
    pictures = [_picture(*size) for size in _PROBED_SIZES]
    alone = [token_id for picture in pictures for token_id in processor.process(picture).tokens.token_ids]
    return processor.tokens_together(pictures) == alone


def _verify_images(module: PreTrainedModel, text: PreTrainedModel, processor: ImageProcessor, vocab_size: int) -> None:
    """Compare the logits of a prompt with two pictures.

    Raises:
        ModelLoadError: they differ by more than rounding, or the model fails.
    """
    try:
        images = [processor.process(_picture(*size)) for size in _PROBED_SIZES]
        input_ids, places, axes = _prompt(images, vocab_size, processor.image_token_id)
        input_ids = input_ids.to(module.device)
        tower = ImageTower(module.model)
        embeds = text.get_input_embeddings()(input_ids)
        features = torch.cat([tower.encode(image) for image in images]).to(embeds)
        embeds[0, places], *deeper = features.split(embeds.shape[-1], dim=1)
        sight = Sight(axes, torch.tensor(places, device=module.device), tuple(deeper)).arguments(input_ids.shape[1])
        of_prompt = _together(module, images) | _of_tokens(module, input_ids, processor.image_token_id)
        with _shallow(text.base_model):
            theirs = module(input_ids=input_ids, use_cache=False, **of_prompt).logits[0].float()
            ours = text(inputs_embeds=embeds, use_cache=False, **sight).logits[0].float()
    except Exception as error:  # whatever the architecture's own code raises
        raise ModelLoadError(f"a picture cannot be tried out: {type(error).__name__}: {first_line(error)}") from error
    if (worst := _error(ours, theirs)) > tolerance_of(module.dtype):
        raise ModelLoadError(
            f"features in place of placeholders give other results than the model alone: logits differ by {worst:.1%}"
        )


def _prompt(
    images: list[ProcessedImage], vocab_size: int, image_token_id: int
) -> tuple[Tensor, list[int], Tensor | None]:
    """Some text, a picture, more text, a picture, more text: token ids ``[1, T]``, where the features go, and positions
    ``[3, T]`` where they are in three axes."""
    words = _words(vocab_size, image_token_id)
    token_ids, places = words[:_PROBED_TEXT], []
    axes, position = [_text_axes(0)], _PROBED_TEXT
    for number, image in enumerate(images, start=1):
        places += [len(token_ids) + place for place in image.tokens.places]
        token_ids += image.tokens.token_ids + words[number * _PROBED_TEXT : (number + 1) * _PROBED_TEXT]
        if image.tokens.axes is not None:
            own = torch.from_numpy(image.tokens.axes) + position
            position = int(own.max()) + 1 + _PROBED_TEXT
            axes += [own, _text_axes(position - _PROBED_TEXT)]
    return torch.tensor([token_ids]), places, torch.cat(axes, dim=1) if len(axes) > 1 else None


def _text_axes(start: int) -> Tensor:
    return torch.arange(start, start + _PROBED_TEXT).expand(3, -1)


def _of_tokens(module: PreTrainedModel, input_ids: Tensor, image_token_id: int) -> dict[str, Tensor]:
    """What some models have to be told of which tokens are of images."""
    takes_types = "mm_token_type_ids" in inspect.signature(module.model.forward).parameters
    return {"mm_token_type_ids": (input_ids == image_token_id).int()} if takes_types else {}


def _words(vocab_size: int, image_token_id: int | None) -> list[int]:
    return [word for word in range(1, vocab_size) if word != image_token_id][: 3 * _PROBED_TEXT]


def _error(ours: Tensor, theirs: Tensor) -> float:
    """The median over tokens of the difference, as a share."""
    errors = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-6)
    return errors.nan_to_num(torch.inf).median().item()


def _together(module: PreTrainedModel, images: list[ProcessedImage]) -> dict[str, Tensor]:
    """The tensors of several images as the model's ``forward`` takes them in one call."""
    together: dict[str, Tensor] = {}
    for name in images[0].tensors:
        parts = [image.tensors[name] for image in images]
        axis = 1 if module.config.model_type in _TILES_OF_A_PROMPT else 0
        sizes = [max(part.shape[dim] for part in parts) for dim in range(parts[0].dim())]
        padded = [_pad(part, sizes, axis) for part in parts]
        tensor = torch.cat(padded, dim=axis)
        together[name] = tensor.to(module.device, module.dtype if tensor.is_floating_point() else None)
    return together


@contextmanager
def _shallow(decoder: Any) -> Iterator[None]:
    """Let ``decoder`` have its first layers alone meanwhile."""
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        yield
        return
    decoder.layers = layers[:_PROBED_LAYERS]
    try:
        yield
    finally:
        decoder.layers = layers


def _pad(part: Tensor, sizes: list[int], axis: int) -> Tensor:
    """Zeros behind ``part``, in all dimensions but ``axis``."""
    wanted = [part.shape[dim] if dim == axis else size for dim, size in enumerate(sizes)]
    if list(part.shape) == wanted:
        return part
    padded = part.new_zeros(wanted)
    padded[tuple(slice(0, size) for size in part.shape)] = part
    return padded


def _picture(width: int, height: int) -> Image.Image:
    """Neither of one colour nor symmetric, so that no tile is empty and no order of tiles is as good as another."""
    rows = torch.arange(height)[:, None, None] * torch.tensor([3, 5, 2])
    columns = torch.arange(width)[None, :, None] * torch.tensor([2, 1, 7])
    return Image.fromarray(((rows + columns + 31) % 256).to(torch.uint8).numpy())
