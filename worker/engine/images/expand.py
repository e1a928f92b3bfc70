"""Puts the tokens of images into prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....shared.errors import ValidationError
from ...models.images.processor import ImageTokens, TokenJoiner
from ..scheduling.image_spans import ImageSpan


def expand(
    prompt_token_ids: Sequence[int],
    image_token_id: int,
    images: Sequence[tuple[bytes, ImageTokens, Any]],
    joiner: TokenJoiner,
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Put the tokens of each image in the place of the placeholder that stands for it.

    Args:
        prompt_token_ids: with one placeholder for each image.
        images: key, tokens and features of each, in the order of their placeholders.
        joiner: joins an image's tokens with those beside it.

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
    is_behind_image = False
    for token_id in prompt_token_ids:
        if token_id != image_token_id:
            joiner.append(token_ids, [token_id]) if is_behind_image else token_ids.append(token_id)
            is_behind_image = False
            continue
        key, tokens, features = next(remaining)
        start = joiner.append(token_ids, tokens.token_ids)
        places = [start + place for place in tokens.places]
        wholes = tuple((start + first, start + stop) for first, stop in tokens.bidirectional)
        spans.append(ImageSpan(start, len(token_ids), places, key, features, tokens.axes, wholes))
        is_behind_image = True
    return token_ids, tuple(spans)


def check_wholes(images: Sequence[ImageSpan], longest: int) -> None:
    """Refuse an image of which a step would have to compute more tokens than it is known to have room for.

    Raises:
        ValidationError: one has more than ``longest`` that see each other.
    """
    for index, image in enumerate(images):
        if (num_tokens := max((end - first for first, end in image.wholes), default=0)) > longest:
            raise ValidationError(
                f"images[{index}]: {num_tokens} of its tokens see each other, and this engine computes at most "
                f"{longest} such in a step; send it smaller"
            )
