"""Small random models that read images, with processors that load without torchvision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from .processors import (
    ALL,
    PLACEHOLDER,
    GlmLike,
    InternVLLike,
    OneVisionLike,
    PartsAlone,
    PixtralLike,
    QwenLike,
    StandIn,
    byte_tokenizer,
    gemma_tokenizer,
)

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


def llava() -> tuple[transformers.PretrainedConfig, Any]:
    """16 tokens an image, whatever its size."""
    vision = ALL.CLIPVisionConfig(**_VISION, image_size=16)
    config = ALL.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT), vision_config=vision, image_token_index=PLACEHOLDER,
        vision_feature_layer=-2, image_seq_length=16,
    )  # fmt: skip
    images = ALL.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    processor = ALL.LlavaProcessor(
        images, byte_tokenizer("<image>"), patch_size=4, vision_feature_select_strategy="default",
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
    tokenizer = byte_tokenizer("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *marks)
    return config, ALL.Idefics3Processor(images, tokenizer, image_seq_len=4)


def internvl() -> tuple[transformers.PretrainedConfig, Any]:
    """Tiles of 4 tokens, more of them for longer images."""
    vision = ALL.InternVLVisionConfig(**{**_VISION, "patch_size": [4, 4]}, image_size=[16, 16])
    config = ALL.InternVLConfig(
        text_config=transformers.Qwen2Config(**TEXT), vision_config=vision, image_token_id=PLACEHOLDER,
        image_seq_length=4,
    )  # fmt: skip
    return config, InternVLLike()


def llava_onevision() -> tuple[transformers.PretrainedConfig, Any]:
    """Return a model with an image as a whole and in tiles, a token after each row; several images are not tiled."""
    grids = [[16, 16], [16, 32], [32, 16], [32, 32]]
    vision = ALL.SiglipVisionConfig(**_VISION, image_size=16, vision_use_head=False)
    config = ALL.LlavaOnevisionConfig(
        text_config=transformers.Qwen2Config(**TEXT), vision_config=vision, image_token_index=PLACEHOLDER,
        video_token_index=300, vision_feature_layer=-1, vision_feature_select_strategy="full",
        image_grid_pinpoints=grids,
    )  # fmt: skip
    images = ALL.LlavaOnevisionImageProcessorPil(size={"height": 16, "width": 16}, image_grid_pinpoints=grids)
    return config, OneVisionLike(images)


def vipllava() -> tuple[transformers.PretrainedConfig, Any]:
    """Return a model as ``llava``, with features of several layers of the vision encoder."""
    _, processor = llava()
    config = ALL.VipLlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT), vision_config=ALL.CLIPVisionConfig(**_VISION, image_size=16),
        image_token_index=PLACEHOLDER, vision_feature_layers=[-2, -1], image_seq_length=16,
    )  # fmt: skip
    return config, processor


def llava_next() -> tuple[transformers.PretrainedConfig, Any]:
    """Return a model with an image as a whole and in tiles, and a token after each row."""
    grids = [[16, 32], [32, 16], [32, 32]]
    config = ALL.LlavaNextConfig(
        text_config=transformers.LlamaConfig(**TEXT), vision_config=ALL.CLIPVisionConfig(**_VISION, image_size=16),
        image_token_index=PLACEHOLDER, vision_feature_layer=-2, image_grid_pinpoints=grids, image_seq_length=16,
    )  # fmt: skip
    images = ALL.LlavaNextImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, image_grid_pinpoints=grids
    )
    processor = ALL.LlavaNextProcessor(
        images, byte_tokenizer("<image>"), patch_size=4, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip
    return config, processor


def smolvlm() -> tuple[transformers.PretrainedConfig, Any]:
    """Return a model as ``idefics3``, with its processor; its own needs num2words and torchvision for videos."""
    _, processor = idefics3()
    config = ALL.SmolVLMConfig(
        text_config=transformers.LlamaConfig(**TEXT), vision_config={**_VISION, "image_size": 16},
        image_token_id=PLACEHOLDER, scale_factor=2, pad_token_id=256,
    )  # fmt: skip
    return config, processor


def _pixtral_vision() -> transformers.PretrainedConfig:
    return ALL.PixtralVisionConfig(**_VISION, head_dim=8, image_size=32)


def mistral3() -> tuple[transformers.PretrainedConfig, Any]:
    """Return a model with a token per 8 by 8 pixels, and a separator after each line."""
    text = transformers.MistralConfig(**TEXT, head_dim=16, sliding_window=None)
    config = ALL.Mistral3Config(
        text_config=text, vision_config=_pixtral_vision(), image_token_index=PLACEHOLDER, spatial_merge_size=2,
        vision_feature_layer=-1,
    )  # fmt: skip
    return config, PixtralLike(8, 2)


def pixtral() -> tuple[transformers.PretrainedConfig, Any]:
    """Return a model as ``mistral3``, with a token per 4 by 4 pixels."""
    text = transformers.MistralConfig(**TEXT, head_dim=16, sliding_window=None)
    config = ALL.LlavaConfig(
        text_config=text, vision_config=_pixtral_vision(), image_token_index=PLACEHOLDER, vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )  # fmt: skip
    return config, PixtralLike(4, 1)


def _turning(sections: list[int], **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **more}
    return {**TEXT, "rope_parameters": rope}


def qwen2_5_vl() -> tuple[transformers.PretrainedConfig, Any]:
    """Return a model with a token per 8 by 8 pixels, images of any size, and positions in three axes."""
    vision = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "patch_size": 4,
        "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = ALL.Qwen2_5_VLConfig(
        text_config=_turning([2, 3, 3]), vision_config=vision, image_token_id=PLACEHOLDER, video_token_id=300,
        vision_start_token_id=301, vision_end_token_id=302, tie_word_embeddings=False,
    )  # fmt: skip
    return config, QwenLike(4)


def qwen2_vl() -> tuple[transformers.PretrainedConfig, Any]:
    """Return a model as ``qwen2_5_vl``, with another vision encoder."""
    vision = {
        "depth": 2, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 4, "patch_size": 4,
        "spatial_merge_size": 2,
    }  # fmt: skip
    config = ALL.Qwen2VLConfig(
        text_config=_turning([2, 3, 3]), vision_config=vision, image_token_id=PLACEHOLDER, video_token_id=300,
        vision_start_token_id=301, vision_end_token_id=302, tie_word_embeddings=False,
    )  # fmt: skip
    return config, QwenLike(4)


def qwen3_vl() -> tuple[transformers.PretrainedConfig, Any]:
    """Return a model whose second and third layers also get features."""
    vision = {
        "depth": 3, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "patch_size": 4,
        "spatial_merge_size": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    text = {**_turning([3, 3, 2], mrope_interleaved=True), "head_dim": 16}
    config = ALL.Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=PLACEHOLDER, video_token_id=300,
        vision_start_token_id=301, vision_end_token_id=302, tie_word_embeddings=False,
    )  # fmt: skip
    return config, QwenLike(4)


def qwen3_vl_moe() -> tuple[transformers.PretrainedConfig, Any]:
    """Return a model as ``qwen3_vl``, with experts."""
    config, processor = qwen3_vl()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    described = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
    described["text_config"] = {**_turning([3, 3, 2], mrope_interleaved=True), "head_dim": 16, **experts}
    described["vision_config"].pop("model_type")
    return ALL.Qwen3VLMoeConfig(**described), processor


def _glm_vision(**more: Any) -> dict[str, Any]:
    return {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "patch_size": 4,
        "image_size": 16, "spatial_merge_size": 2, "initializer_range": 0.3, **more,
    }  # fmt: skip


def _glm_marks() -> dict[str, int]:
    return {
        "image_token_id": PLACEHOLDER, "video_token_id": 300, "image_start_token_id": 301, "image_end_token_id": 302,
        "video_start_token_id": 303, "video_end_token_id": 304,
    }  # fmt: skip


def glm4v() -> tuple[transformers.PretrainedConfig, Any]:
    """Return a model as ``qwen2_vl``, with other vision encoder, norms and interleaved rotary pairs."""
    config = ALL.Glm4vConfig(text_config=_turning([2, 3, 3]), vision_config=_glm_vision(), **_glm_marks())
    return config, GlmLike(4)


def glm46v() -> tuple[transformers.PretrainedConfig, Any]:
    """Return a model as ``glm4v``, with the same parts."""
    text = ALL.Glm4vTextConfig(**_turning([2, 3, 3]))
    config = ALL.Glm46VConfig(text_config=text, vision_config=ALL.Glm4vVisionConfig(**_glm_vision()), **_glm_marks())
    return config, GlmLike(4)


def glm4v_moe() -> tuple[transformers.PretrainedConfig, Any]:
    """Return a model as ``glm4v``, with experts, and rotary positions on half of each head."""
    text = {
        **_turning([1, 1, 2], partial_rotary_factor=0.5), "moe_intermediate_size": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    config = ALL.Glm4vMoeConfig(text_config=text, vision_config=_glm_vision(), **_glm_marks())
    return config, GlmLike(4)


def glm_ocr() -> tuple[transformers.PretrainedConfig, Any]:
    """Return a model as ``glm4v``, with another vision encoder."""
    text = {**_turning([2, 3, 3]), "head_dim": 16}
    config = ALL.GlmOcrConfig(text_config=text, vision_config=_glm_vision(), **_glm_marks())
    return config, GlmLike(4)


def gemma3() -> tuple[transformers.PretrainedConfig, Any]:
    """16 tokens an image, which see each other; in every other layer within a window of fewer."""
    text = ALL.Gemma3TextConfig(
        **TEXT, head_dim=16, query_pre_attn_scalar=16, sliding_window=7,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    tokenizer = gemma_tokenizer()
    config = ALL.Gemma3Config(
        text_config=text, vision_config=ALL.SiglipVisionConfig(**_VISION, image_size=16), mm_tokens_per_image=16,
        boi_token_index=tokenizer.boi_token_id, eoi_token_index=tokenizer.eoi_token_id,
        image_token_index=tokenizer.image_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    images = ALL.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return config, ALL.Gemma3Processor(images, tokenizer, image_seq_length=16)


SEEING: dict[str, Callable[[], tuple[transformers.PretrainedConfig, Any]]] = {
    "llava": llava,
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "vipllava": vipllava,
    "idefics3": idefics3,
    "smolvlm": smolvlm,
    "mistral3": mistral3,
    "pixtral": pixtral,
    "internvl": internvl,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
    "glm4v": glm4v,
    "glm46v": glm46v,
    "glm4v_moe": glm4v_moe,
    "glm_ocr": glm_ocr,
    "gemma3": gemma3,
}


# Tokens of a step, so few that chunks end inside of images, or before them where one step has to compute all of one:
# then its tokens, and one for each of the other five requests that an engine of the trial may have.
_SMALL_BUDGET = 7
_SMALL_BUDGETS = {"gemma3": 16 + 5}


def small_budget(name: str) -> int:
    """Tokens of a step with which a prompt of the model ``name`` of ``SEEING`` is cut several times."""
    return _SMALL_BUDGETS.get(name, _SMALL_BUDGET)


# Others of transformers that many know, and why there is no row of tokens for them.
NOT_TRIED: dict[str, str] = {
    "gemma4": "its images are not served: their tokens see each other, and layers look at the token ids again",
    "lfm2_vl": "transformers has its image processor for torchvision alone; without it images are refused by name",
    "paligemma": "its images are not served: all tokens of a prompt see each other, text as well",
}


def write_vision_model(name: str, folder: Path, seed: int = 0) -> Any:
    """Write a model of ``SEEING`` with random weights into ``folder``; returns its processor."""
    torch.manual_seed(seed)
    config, processor = SEEING[name]()
    model: Any = transformers.AutoModelForImageTextToText.from_config(config)
    if name == "gemma3":  # its projection is initialised with zeros, so all images would be equal
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.3)
    model.save_pretrained(folder)
    if isinstance(processor, PartsAlone):
        processor.images.save_pretrained(folder)
        byte_tokenizer(processor.image_token).save_pretrained(folder)
        processor.save_settings(folder)
    elif isinstance(processor, StandIn):
        byte_tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]").save_pretrained(folder)
    else:
        processor.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("<image>", processor.image_token))
    return processor
