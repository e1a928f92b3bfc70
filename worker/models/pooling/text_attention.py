"""Attention of texts that lie one behind the other in a row: each by itself, under transformers' own rule."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ....kernels.paged_attention import MaskRule

_NAME_NUMBERS = itertools.count()


class TextAttention:
    """Attention within each text of a packed row. ``begin`` every step."""

    def __init__(self) -> None:
        self.name = f"penstock_texts_{next(_NAME_NUMBERS)}"
        self._lens: list[int] = []
        self._masks: dict[tuple[int, int], tuple[MaskRule, Tensor | None]] = {}
        AttentionInterface.register(self.name, self._attend)
        AttentionMaskInterface.register(self.name, return_rule)

    def begin(self, lens: list[int]) -> None:
        """Say how many tokens each text of the next forward has."""
        self._lens = lens
        self._masks = {}

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: MaskRule | None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention function: ``[1, H, T, D]`` in, ``([1, T, H, DV], None)`` out."""
        is_grouped = query.shape[1] != key.shape[1]
        parts = [
            nn.functional.scaled_dot_product_attention(
                *texts, attn_mask=self._mask(attention_mask, texts[0]), scale=scaling, enable_gqa=is_grouped
            )
            for texts in zip(*(each.split(self._lens, dim=2) for each in (query, key, value)), strict=True)
        ]
        return torch.cat(parts, dim=2).transpose(1, 2), None

    def _mask(self, rule: MaskRule | None, query: Tensor) -> Tensor | None:
        """Which keys each query of a text sees, ``[L, L]``; None if all."""
        if rule is None:
            return None
        length = query.shape[2]
        # The rule is held, so that no other one can get its id meanwhile.
        _, mask = self._masks.get((id(rule), length), (None, None))
        if (id(rule), length) not in self._masks:
            at = torch.arange(length, device=query.device)
            seen = torch.as_tensor(rule(0, 0, at[:, None], at[None])).expand(length, length)
            mask = None if bool(seen.all()) else seen
            self._masks[id(rule), length] = rule, mask
        return mask


def return_rule(*_: Any, mask_function: MaskRule, **__: Any) -> MaskRule:
    """transformers' mask function: hands the rule on as it is."""
    return mask_function
