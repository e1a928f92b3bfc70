"""Options in which the attention of models differs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .batch import MaskRule


@dataclass(frozen=True)
class Variant:
    """Arguments of ``paged_attention`` that belong to the model and not to the step; see there."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    mask_rule: MaskRule | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def has_plain_scores(self) -> bool:
        """Whether the softmax takes scaled scores without cap, sinks or ALiBi."""
        return self.softcap is None and self.sinks is None and self.alibi_slopes is None
