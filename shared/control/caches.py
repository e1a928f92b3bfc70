"""Calls about the caches of an engine; under the rules of ``calls``."""

from __future__ import annotations

import msgspec

from ..errors import ValidationError
from ..values.shown import shown

MULTIMODAL, ENCODER = INPUT_CACHES = ("multimodal", "encoder")


class ResetPrefixCache(msgspec.Struct, array_like=True, omit_defaults=True, tag="reset_prefix_cache"):
    """Drop the KV cache of earlier requests. Answer: ``PrefixCacheReset``.

    With ``reset_running_requests``, running requests are queued again first, to resume after their last token.
    """

    reset_running_requests: bool = False


class PrefixCacheReset(msgspec.Struct, array_like=True, tag="prefix_cache_reset"):
    """``success`` is False, and nothing is done, while any block is in use."""

    success: bool


class ResetInputCache(msgspec.Struct, array_like=True, tag="reset_input_cache"):
    """Drop cached images, sounds and videos of earlier requests. Answer: ``InputCacheReset``.

    ``cache`` is "multimodal" for processed inputs, or "encoder" for the outputs of the model's encoders.
    """

    cache: str

    def __post_init__(self) -> None:
        if self.cache not in INPUT_CACHES:
            raise ValidationError(f"cache must be one of {', '.join(INPUT_CACHES)}, got {shown(self.cache)}")


class InputCacheReset(msgspec.Struct, array_like=True, tag="input_cache_reset"):
    """The number of dropped entries."""

    num_entries: int
