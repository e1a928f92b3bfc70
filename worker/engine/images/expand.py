"""Inserts the tokens of images into prompts."""

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
    """Replace the placeholder of each image by the image's tokens.

    Args:
        prompt_token_ids: prompt with one placeholder per image.
        images: key, tokens and features of each image, in the order of the placeholders.
        joiner: joins an image's tokens with the tokens around them.

    Raises:
        ValidationError: the numbers of images and placeholders differ.
    """
    num_places = sum(token_id == image_token_id for token_id in prompt_token_ids)
    if num_places != len(images):
        raise ValidationError(
            f"images: the prompt has {num_places} placeholders (token {image_token_id}) for {len(images)} images; "
            "write the model's placeholder once for each image, or send chat messages"
        )
    token_ids: list[int] = []
    spans: list[ImageSpan] = []
    remaining = iter(images)
    follows_image = False
    for token_id in prompt_token_ids:
        if token_id != image_token_id:
            joiner.append(token_ids, [token_id]) if follows_image else token_ids.append(token_id)
            follows_image = False
            continue
        key, tokens, features = next(remaining)
        start = joiner.append(token_ids, tokens.token_ids)
        places = [start + place for place in tokens.places]
        bidirectional = tuple((start + first, start + stop) for first, stop in tokens.bidirectional)
        spans.append(ImageSpan(start, len(token_ids), places, key, features, tokens.axes, bidirectional))
        follows_image = True
    return token_ids, tuple(spans)


def check_bidirectional(images: Sequence[ImageSpan], longest: int) -> None:
    """Refuse an image with a run of tokens that may not fit into a step.

    Raises:
        ValidationError: more than ``longest`` tokens of an image attend to each other.
    """
    for index, image in enumerate(images):
        if (num_tokens := max((end - first for first, end in image.bidirectional), default=0)) > longest:
            raise ValidationError(
                f"images[{index}]: {num_tokens} of its tokens attend to each other, and this engine computes at most "
                f"{longest} of them in a step; send a smaller image"
            )
