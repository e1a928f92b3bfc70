"""Small random models that read images, with processors that load without torchvision."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# Of its classes pyright knows those that the package imports.
ALL: Any = transformers
PLACEHOLDER = 259
_SPECIAL = ("<pad>", "<s>", "</s>")
TEXT: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "patch_size": 4,
}
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% elif part.type == 'image' %}<image>{% endif %}{% endfor %}{% endif %} {% endfor %}assistant: "
)


def _tokenizer(*placeholders: str) -> transformers.PreTrainedTokenizerFast:
    """Of bytes; the first placeholder is ``PLACEHOLDER``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in (*_SPECIAL, *placeholders)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def llava() -> tuple[transformers.PretrainedConfig, Any]:
    """16 tokens an image, whatever its size."""
    vision = ALL.CLIPVisionConfig(**_VISION, image_size=16)
    config = ALL.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT), vision_config=vision, image_token_index=PLACEHOLDER,
        vision_feature_layer=-2, image_seq_length=16,
    )  # fmt: skip
    images = ALL.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    processor = ALL.LlavaProcessor(
        images, _tokenizer("<image>"), patch_size=4, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip
    return config, processor


def idefics3() -> tuple[transformers.PretrainedConfig, Any]:
    """Tiles of 4 tokens, with marks of rows and columns between them: more of them for longer images."""
    config = ALL.Idefics3Config(
        text_config=transformers.LlamaConfig(**TEXT), vision_config={**_VISION, "image_size": 16},
        image_token_id=PLACEHOLDER, scale_factor=2, pad_token_id=256,
    )  # fmt: skip
    images = ALL.Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})
    marks = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = _tokenizer("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *marks)
    return config, ALL.Idefics3Processor(images, tokenizer, image_seq_len=4)


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
        made = dict(self._images(images, return_tensors="pt", patch_size=self._pixels))
        token_ids: list[int] = []
        for height, width in made["image_sizes"]:
            rows = int(height) // self._pixels
            columns = int(width) // self._pixels
            token_ids += ([PLACEHOLDER] * columns + [PLACEHOLDER + 1]) * rows
            token_ids[-1] = PLACEHOLDER + 2
        return {"input_ids": torch.tensor([token_ids]), **made}


class InternVLLike(StandIn):
    """``InternVLProcessor``: four tokens a tile, between two that are none."""

    def __init__(self) -> None:
        size = {"height": 16, "width": 16}
        self._images = ALL.GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, max_patches=4)

    def __call__(self, *, images: list[Image.Image], **_: Any) -> dict[str, Any]:
        made = dict(self._images(images, return_tensors="pt"))
        token_ids: list[int] = []
        for num_tiles in made.pop("num_patches"):
            token_ids += [PLACEHOLDER + 1, *[PLACEHOLDER] * (4 * int(num_tiles)), PLACEHOLDER + 2]
        return {"input_ids": torch.tensor([token_ids]), **made}


def internvl() -> tuple[transformers.PretrainedConfig, Any]:
    """Tiles of 4 tokens, more of them for longer images."""
    vision = ALL.InternVLVisionConfig(**{**_VISION, "patch_size": [4, 4]}, image_size=[16, 16])
    config = ALL.InternVLConfig(
        text_config=transformers.Qwen2Config(**TEXT), vision_config=vision, image_token_id=PLACEHOLDER,
        image_seq_length=4,
    )  # fmt: skip
    return config, InternVLLike()


def _pixtral_vision() -> transformers.PretrainedConfig:
    return ALL.PixtralVisionConfig(**_VISION, head_dim=8, image_size=32)


def mistral3() -> tuple[transformers.PretrainedConfig, Any]:
    """A token for 8 by 8 pixels, with one behind each line that is none."""
    text = transformers.MistralConfig(**TEXT, head_dim=16, sliding_window=None)
    config = ALL.Mistral3Config(
        text_config=text, vision_config=_pixtral_vision(), image_token_index=PLACEHOLDER, spatial_merge_size=2,
        vision_feature_layer=-1,
    )  # fmt: skip
    return config, PixtralLike(8, 2)


def pixtral() -> tuple[transformers.PretrainedConfig, Any]:
    """As ``mistral3``, with a token for 4 by 4 pixels."""
    text = transformers.MistralConfig(**TEXT, head_dim=16, sliding_window=None)
    config = ALL.LlavaConfig(
        text_config=text, vision_config=_pixtral_vision(), image_token_index=PLACEHOLDER, vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )  # fmt: skip
    return config, PixtralLike(4, 1)


SEEING: dict[str, Callable[[], tuple[transformers.PretrainedConfig, Any]]] = {
    "llava": llava,
    "idefics3": idefics3,
    "mistral3": mistral3,
    "pixtral": pixtral,
    "internvl": internvl,
}


def write_seeing_model(name: str, folder: Path, seed: int = 0) -> Any:
    """Write a model of ``SEEING`` with random weights into ``folder``; returns its processor."""
    torch.manual_seed(seed)
    config, processor = SEEING[name]()
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    if isinstance(processor, StandIn):
        _tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]").save_pretrained(folder)
    else:
        processor.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return processor


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """Noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    """``image`` as a file."""
    written = io.BytesIO()
    image.save(written, "PNG")
    return written.getvalue()


def by_transformers(
    folder: Path, processor: Any, prompt: list[int], images: list[Image.Image], num_tokens: int
) -> list[int]:
    """What ``generate`` of transformers makes of a prompt with placeholders, greedily."""
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    if isinstance(processor, StandIn):
        made = processor(images=images)
        expanded, lines = [], [processor(images=[image])["input_ids"][0].tolist() for image in images]
        for token_id in prompt:
            expanded += lines.pop(0) if token_id == PLACEHOLDER else [token_id]
        inputs = {**made, "input_ids": torch.tensor([expanded])}
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    else:
        text = processor.tokenizer.decode(prompt, skip_special_tokens=False)
        inputs = processor(text=text, images=images, return_tensors="pt", add_special_tokens=False)
    out = model.generate(
        **inputs, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=256,
    )  # fmt: skip
    return out[0, inputs["input_ids"].shape[1] :].tolist()
