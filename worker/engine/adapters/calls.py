"""Control calls about adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....shared.control.model import AddLora, ListLoras, LoraChanged, LoraList, PinLora, RemoveLora
from ....shared.errors import UnsupportedCallError
from .library import AdapterLibrary


def adapter_calls(library: AdapterLibrary[Any] | None) -> dict[type, Callable[[Any], LoraChanged | LoraList | None]]:
    """Return a function per type of call; ``library`` is None for an engine without adapters."""
    if library is None:
        return {
            AddLora: _refuse_adapters,
            PinLora: _refuse_adapters,
            RemoveLora: lambda _: LoraChanged(success=False),
            ListLoras: lambda _: LoraList([]),
        }
    return {
        AddLora: lambda call: _add_adapter(library, call),
        PinLora: lambda call: LoraChanged(library.pin(call.lora_id) if call.pinned else library.unpin(call.lora_id)),
        RemoveLora: lambda call: LoraChanged(library.remove(call.lora_id)),
        ListLoras: lambda _: LoraList(library.ids()),
    }


def _add_adapter(library: AdapterLibrary[Any], call: AddLora) -> LoraChanged | None:
    is_new = library.load(call.lora_request)
    return None if is_new is None else LoraChanged(is_new)


def _refuse_adapters(call: AddLora | PinLora) -> LoraChanged:
    name = call.__struct_config__.tag
    raise UnsupportedCallError(f"{name}: this engine serves no adapters; start it with --enable-lora")
