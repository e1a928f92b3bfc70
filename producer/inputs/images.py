"""Images of prompts as callers pass them: files, Pillow images and arrays, with a prompt or in chat messages."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from typing import Any

from ...shared.deployment.records import ModelCard
from ...shared.errors import UnsupportedParameterError, ValidationError
from ...shared.params.images import MAX_IMAGES, ImageInput, check_image_bytes
from ...shared.values.shown import shown

# Limit per request, because its images are written to Redis in one call.
MAX_TOTAL_BYTES = 64 << 20
_IMAGE_TYPES = ("image_url", "input_image", "image", "image_pil")
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "messages")
# Modes with transparency that PNG lacks, and their replacements.
_WITH_ALPHA = {"La": "LA", "PA": "RGBA", "RGBa": "RGBA"}


def is_prompt_with_data(prompt: object) -> bool:
    """Return whether ``prompt`` is a dictionary such as ``{"prompt": ..., "multi_modal_data": {"image": ...}}``."""
    return isinstance(prompt, Mapping) and any(name in prompt for name in _PROMPT_KEYS) and "role" not in prompt


def split_prompt(prompt: Any) -> tuple[Any, list[ImageInput]]:
    """Split a prompt of any form into the prompt without its images, and the images.

    Images are passed with a prompt under ``multi_modal_data``, or in parts of chat messages. A bare ``{"type":
    "image"}`` replaces such a part.

    Raises:
        ValidationError: an image is invalid or too large; names the field.
        UnsupportedParameterError: the prompt has data other than images, or the URL of an image.
    """
    if not is_prompt_with_data(prompt):
        return _split(prompt)
    unknown = prompt.keys() - {*_PROMPT_KEYS, "multi_modal_data"}
    if unknown:
        raise UnsupportedParameterError(f"prompt[{shown(min(map(str, unknown)))}] is not supported; leave it out")
    keys = [name for name in _PROMPT_KEYS if prompt.get(name) is not None]
    if len(keys) != 1:
        raise ValidationError(f"a prompt must have one of {', '.join(_PROMPT_KEYS)}, got {shown(keys)}")
    bare, images = _split(prompt[keys[0]])
    return bare, _checked_images([*images, *_images_of_data(prompt.get("multi_modal_data"))])


def image_bytes(field: str, value: Any) -> bytes:
    """Return an image as a file: bytes unchanged; Pillow images and arrays as PNG.

    Args:
        value: bytes of a PNG, JPEG, WebP or GIF file; a ``PIL.Image.Image``; or an array or tensor of ``uint8``,
            ``[height, width]``, ``[height, width, 3]`` or ``[height, width, 4]``.

    Raises:
        ValidationError: it is none of these.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return check_image_bytes(field, value)
    if hasattr(value, "__array__") and not hasattr(value, "getbands"):
        value = _picture_of_array(field, value)
    if not hasattr(value, "save") or not hasattr(value, "size"):
        kind = shown(type(value).__name__)
        raise ValidationError(f"{field} must be bytes of an image file, a PIL image or an array of uint8, got {kind}")
    if getattr(value, "mode", None) in ("I", "F"):
        raise ValidationError(f"{field} has mode {value.mode}, which does not define white; convert it to L or RGB")
    buffer = io.BytesIO()
    try:
        is_png = value.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
        picture = value if is_png else value.convert(_WITH_ALPHA.get(value.mode, "RGB"))
        picture.save(buffer, "PNG")
    except Exception as error:  # the image's file is damaged, or PNG lacks its mode
        raise ValidationError(f"{field} cannot be written as PNG: {error}") from error
    return check_image_bytes(field, buffer.getvalue())


def data_url_bytes(field: str, url: str) -> bytes:
    """Return the image of a URL such as ``data:image/png;base64,...``.

    Raises:
        ValidationError: it is not such a URL.
    """
    head, comma, encoded = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ValidationError(f"{field} must be a data URL such as data:image/png;base64,..., got {shown(url)}")
    try:
        return check_image_bytes(field, base64.b64decode(encoded, validate=True))
    except (binascii.Error, ValueError) as error:
        if isinstance(error, ValidationError):
            raise
        raise ValidationError(
            f"{field} is not base64 ({error}); encode the file's bytes without line breaks"
        ) from error


def is_image_part(part: object) -> bool:
    """Return whether a part of a message is an image."""
    return isinstance(part, Mapping) and part.get("type") in _IMAGE_TYPES


def is_data_url(url: str) -> bool:
    """Return whether ``url`` contains the image itself, and not its address."""
    return url[:5].lower() == "data:"


def image_url_of(field: str, part: Mapping[str, Any]) -> tuple[str, str]:
    """Return the field name of the URL of an ``image_url`` or ``input_image`` part, and the URL.

    Raises:
        ValidationError: it has no URL.
        UnsupportedParameterError: it refers to a file.
    """
    if part.get("file_id") is not None:
        raise UnsupportedParameterError(f"{field}.file_id is not supported; send the image as a data URL")
    url = part.get("image_url")
    if isinstance(url, Mapping):
        field, url = f"{field}.image_url", url.get("url")
        field += ".url"
    else:
        field += ".image_url"
    if not isinstance(url, str) or not url:
        raise ValidationError(f"{field} must be the URL of an image, got {shown(url)}")
    return field, url


def _split(prompt: Any) -> tuple[Any, list[ImageInput]]:
    is_chat = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray)
    if not is_chat or not any(isinstance(message, Mapping) for message in prompt):
        return prompt, []
    images: list[ImageInput] = []
    messages = [_without_images(f"messages[{at}]", message, images) for at, message in enumerate(prompt)]
    return messages, _checked_images(images)


def _without_images(field: str, message: Any, images: list[ImageInput]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple) or not any(map(is_image_part, content)):
        return message
    parts = []
    for at, part in enumerate(content):
        if is_image_part(part):
            images.append(ImageInput.from_bytes(_bytes_of_part(f"{field}.content[{at}]", part)))
            part = {"type": "image"}
        parts.append(part)
    return {**message, "content": parts}


def _bytes_of_part(field: str, part: Mapping[str, Any]) -> bytes:
    kind = part["type"]
    if kind in ("image", "image_pil"):
        name = kind if part.get(kind) is not None else "image"
        if part.get(name) is None:
            raise ValidationError(f"{field}.{kind} must be an image: bytes, a PIL image or an array")
        return image_bytes(f"{field}.{name}", part[name])
    field, url = image_url_of(field, part)
    if not is_data_url(url):
        raise UnsupportedParameterError(
            f"{field} is the address of an image, {shown(url)}, which only the gateway can fetch, if configured; "
            "send the image itself"
        )
    return data_url_bytes(field, url)


def _images_of_data(data: Any) -> list[ImageInput]:
    if data is None:
        return []
    if not isinstance(data, Mapping):
        raise ValidationError(f"multi_modal_data must be a dictionary such as {{'image': ...}}, got {shown(data)}")
    if unknown := data.keys() - {"image"}:
        raise UnsupportedParameterError(
            f"multi_modal_data[{shown(min(map(str, unknown)))}] is not supported; images are, under 'image'"
        )
    value = data.get("image")
    images = list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
    return [
        ImageInput.from_bytes(image_bytes(f"multi_modal_data['image'][{at}]", image)) for at, image in enumerate(images)
    ]


def check_number(images: Sequence[ImageInput], card: ModelCard) -> None:
    """Refuse images that no engine of the model accepts, as far as its card says.

    Raises:
        UnsupportedParameterError: it accepts no images; gives the reason.
        ValidationError: it accepts fewer.
    """
    if card.max_images is None or len(images) <= card.max_images:
        return
    if not card.max_images:
        why = card.image_refusal or f"the engines of model {shown(card.model)} accept none"
        raise UnsupportedParameterError(f"images: {why}; send text alone, or ask for another model")
    raise ValidationError(
        f"images: model {shown(card.model)} takes at most {card.max_images} in a request, got {len(images)}; send "
        "fewer, or have its workers started with more --max-images"
    )


def _checked_images(images: list[ImageInput]) -> list[ImageInput]:
    if len(images) > MAX_IMAGES:
        raise ValidationError(f"images: a request has at most {MAX_IMAGES}, got {len(images)}; send fewer")
    num_bytes = sum(len(image.data) for image in dict.fromkeys(images))
    if num_bytes > MAX_TOTAL_BYTES:
        raise ValidationError(
            f"images: they have {num_bytes} bytes together, and a request has at most {MAX_TOTAL_BYTES}; make them "
            "smaller"
        )
    return images


def _picture_of_array(field: str, value: Any) -> Any:
    # Imported here, since callers without arrays need neither.
    import numpy as np
    from PIL import Image

    try:
        array = np.asarray(value)
        if array.dtype != np.uint8 or array.size == 0:
            raise ValidationError(f"{field} must be an array of uint8, not empty, got {array.dtype} {array.shape}")
        return Image.fromarray(array)
    except ValidationError:
        raise
    except Exception as error:  # a tensor on a GPU, or a shape that is not an image's
        raise ValidationError(f"{field} is not the array of an image: {error}") from error
