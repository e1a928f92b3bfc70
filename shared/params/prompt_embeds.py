"""A prompt of embeddings, as it is sent."""

from __future__ import annotations

import msgspec

from ..errors import ValidationError
from ..values.shown import shown

EMBEDS_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class PromptEmbeds(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """A prompt as embeddings, one row of ``shape`` ``(prompt tokens, hidden size)`` in place of each token.

    ``data`` holds the items, row after row, little-endian.

    Raises:
        ValidationError: the dtype is unknown, or the size of ``data`` does not fit dtype and shape.
    """

    dtype: str
    shape: tuple[int, int]
    data: bytes

    def __post_init__(self) -> None:
        if self.dtype not in EMBEDS_ITEM_BYTES:
            raise ValidationError(
                f"prompt_embeds.dtype must be one of {', '.join(EMBEDS_ITEM_BYTES)}, got {shown(self.dtype)}"
            )
        num_rows, hidden_size = self.shape
        if min(self.shape) < 1 or len(self.data) != num_rows * hidden_size * EMBEDS_ITEM_BYTES[self.dtype]:
            raise ValidationError(
                f"prompt_embeds.data must hold {num_rows} x {hidden_size} items of {self.dtype}, got "
                f"{len(self.data)} bytes"
            )
