"""What may be asked of an engine about what it keeps of earlier requests; under the rules of ``calls``."""

from __future__ import annotations

import msgspec

from ..errors import ValidationError
from ..values.shown import shown

MULTIMODAL, ENCODER = INPUT_CACHES = ("multimodal", "encoder")


class ResetPrefixCache(msgspec.Struct, array_like=True, omit_defaults=True, tag="reset_prefix_cache"):
    """Forget what earlier requests have left in the KV cache. Answer: ``PrefixCacheReset``.

    With ``reset_running_requests`` what runs is queued again first, to go on after its last token.
    """

    reset_running_requests: bool = False


class PrefixCacheReset(msgspec.Struct, array_like=True, tag="prefix_cache_reset"):
    """``success`` is False, and nothing is done, while any block is in use."""

    success: bool


class ResetInputCache(msgspec.Struct, array_like=True, tag="reset_input_cache"):
    """Forget what was kept of earlier images, sounds and videos. Answer: ``InputCacheReset``.

    ``cache`` is "multimodal" for processed inputs, or "encoder" for what the model's encoders made of them.
    """

    cache: str

    def __post_init__(self) -> None:
        if self.cache not in INPUT_CACHES:
            raise ValidationError(f"cache must be one of {', '.join(INPUT_CACHES)}, got {shown(self.cache)}")


class InputCacheReset(msgspec.Struct, array_like=True, tag="input_cache_reset"):
    """So many entries were forgotten."""

    num_entries: int
