"""Calls about low-rank adapters; under the rules of ``calls``."""

from __future__ import annotations

import msgspec

from ..errors import ValidationError
from ..params.lora import LoRARequest
from ..values.shown import shown


def _check_lora_id(lora_id: object) -> None:
    if isinstance(lora_id, bool) or not isinstance(lora_id, int) or lora_id < 1:
        raise ValidationError(f"lora_id must be an integer of at least 1, got {shown(lora_id)}")


class AddLora(msgspec.Struct, array_like=True, tag="add_lora"):
    """Load an adapter, for later requests. Answer: ``LoraChanged``, or ``UnsupportedCallError``."""

    lora_request: LoRARequest

    def __post_init__(self) -> None:
        if not isinstance(self.lora_request, LoRARequest):
            raise ValidationError(f"lora_request must be a LoRARequest, got {shown(self.lora_request)}")


class RemoveLora(msgspec.Struct, array_like=True, tag="remove_lora"):
    """Unload an adapter. Answer: ``LoraChanged``."""

    lora_id: int

    def __post_init__(self) -> None:
        _check_lora_id(self.lora_id)


class ListLoras(msgspec.Struct, array_like=True, tag="list_loras"):
    """List the loaded adapters. Answer: ``LoraList``."""


class PinLora(msgspec.Struct, array_like=True, tag="pin_lora"):
    """Keep an adapter loaded whatever others are added; or no longer than others, if ``pinned`` is False.

    Answer: ``LoraChanged``, or ``UnsupportedCallError``.
    """

    lora_id: int
    pinned: bool = True

    def __post_init__(self) -> None:
        _check_lora_id(self.lora_id)


class LoraChanged(msgspec.Struct, array_like=True, tag="lora_changed"):
    """``success`` is False if nothing changed: the adapter was loaded already, or is not loaded."""

    success: bool


class LoraList(msgspec.Struct, array_like=True, tag="lora_list"):
    """Ids of the loaded adapters."""

    lora_ids: list[int]
