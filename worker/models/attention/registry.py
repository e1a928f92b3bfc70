"""Attention functions that models of transformers can use by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def register_attention(name: str, attend: Callable[..., Any], make_mask: Callable[..., Any] | None = None) -> None:
    """Let models use ``attend`` by ``name``, and the masks that ``make_mask`` returns; None to keep its masks."""
    # Imported late, because a model whose structure is stored needs no transformers.
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attend)
    if make_mask is not None:
        AttentionMaskInterface.register(name, make_mask)
