"""Where the adapters of the row lora lie, and of what rank they are."""

from __future__ import annotations

from pathlib import Path

RANK = 8


def adapter_folder(folder: Path, number: int) -> Path:
    """Of an adapter, as PEFT saves it."""
    return folder / f"adapter-{number}"


def merged_folder(folder: Path, number: int) -> Path:
    """Of the model with that adapter in its weights."""
    return folder / f"merged-{number}"
