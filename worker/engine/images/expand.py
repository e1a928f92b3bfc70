"""Puts the tokens of images into prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....shared.errors import ValidationError
from ...models.images.processor import ImageTokens
from ..scheduling.image_spans import ImageSpan


def expand(
    prompt_token_ids: Sequence[int], image_token_id: int, images: Sequence[tuple[bytes, ImageTokens, Any]]
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Put the tokens of each image in the place of the placeholder that stands for it.

    Args:
        prompt_token_ids: with one placeholder for each image.
        images: key, tokens and features of each, in the order of their placeholders.

    Raises:
        ValidationError: there are more images than placeholders, or fewer.
    """
    num_places = sum(token_id == image_token_id for token_id in prompt_token_ids)
    if num_places != len(images):
        raise ValidationError(
            f"images: the prompt has {num_places} places for images (token {image_token_id}), and {len(images)} came; "
            "write the model's placeholder once for each image, or send chat messages"
        )
    token_ids: list[int] = []
    spans: list[ImageSpan] = []
    remaining = iter(images)
    for token_id in prompt_token_ids:
        if token_id != image_token_id:
            token_ids.append(token_id)
            continue
        key, tokens, features = next(remaining)
        start = len(token_ids)
        token_ids += tokens.token_ids
        places = [start + place for place in tokens.places]
        spans.append(ImageSpan(start, len(token_ids), places, key, features, tokens.axes))
    return token_ids, tuple(spans)
