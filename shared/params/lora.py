"""The adapter that a request names."""

from __future__ import annotations

import msgspec

from ..errors import ValidationError
from ..values.encodable import check_path, check_text
from ..values.shown import shown
from .adapters import check_digest


class LoRARequest(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """A low-rank adapter to apply; ``lora_int_id`` is at least 1 and unique per adapter.

    ``digest`` is ``adapter_digest`` of the folder. It is set when a request is enqueued, so that the request ends with
    the adapter that it began with, whatever name and path mean by then. "" if unknown.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False
    digest: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise ValidationError(f"lora_int_id must be an integer of at least 1, got {shown(self.lora_int_id)}")
        for name in ("lora_name", "lora_path"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValidationError(f"{name} must be a string that is not empty, got {shown(getattr(self, name))}")
            check_text(name, getattr(self, name))
        check_path("lora_path", self.lora_path)
        if self.base_model_name is not None:
            check_text("base_model_name", self.base_model_name)
        if self.digest != "":
            check_digest("digest", self.digest)
