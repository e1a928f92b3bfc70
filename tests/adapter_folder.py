"""Folders as PEFT saves them, for tests that do not look into the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_adapter(folder: Path, weights: bytes = b"weights", **fields: Any) -> Path:
    """Write an adapter of rank 8 whose configuration has ``fields``, too."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder
