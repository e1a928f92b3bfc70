"""Folders of the adapters of the row lora, and their rank."""

from __future__ import annotations

from pathlib import Path

RANK = 8


def adapter_folder(folder: Path, number: int) -> Path:
    """Return the folder of an adapter, as PEFT saves it."""
    return folder / f"adapter-{number}"


def merged_folder(folder: Path, number: int) -> Path:
    """Return the folder of the model with an adapter merged into its weights."""
    return folder / f"merged-{number}"
