"""Prompts as embeddings: arrays of numpy or torch, read without importing either."""

from __future__ import annotations

import sys
from typing import Any, Protocol, runtime_checkable

from ...shared.errors import ValidationError
from ...shared.params.prompt_embeds import EMBEDS_ITEM_BYTES, PromptEmbeds


@runtime_checkable
class EmbedsArray(Protocol):
    """A numpy array or a torch tensor, ``[prompt tokens, hidden size]``, of float32, float16 or bfloat16."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...


def encode_embeds(array: EmbedsArray) -> PromptEmbeds:
    """Return ``array`` in the form of a message.

    Raises:
        ValidationError: it has another dtype or number of dimensions, or is empty.
    """
    # numpy names a dtype with another byte order ">f4", which is not in the list.
    dtype, shape = str(array.dtype).removeprefix("torch."), tuple(array.shape)
    if dtype not in EMBEDS_ITEM_BYTES:
        raise ValidationError(
            f"prompt embeddings must be of dtype {', '.join(EMBEDS_ITEM_BYTES)}, got {dtype}; convert them first"
        )
    if len(shape) != 2 or 0 in shape:
        raise ValidationError(
            f"prompt embeddings must have the shape [prompt tokens, hidden size], neither of them 0, got {list(shape)}"
        )
    return PromptEmbeds(dtype, shape, _item_bytes(array))


def _item_bytes(array: Any) -> bytes:
    """Return the items in row-major order."""
    if hasattr(array, "tobytes"):
        return array.tobytes()
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        raise ValidationError(f"prompt embeddings must be a numpy array or a torch tensor, got {type(array).__name__}")
    # Viewed as bytes, since numpy has no bfloat16.
    return array.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
