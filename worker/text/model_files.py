"""JSON files of a model folder that configure its text processing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...shared.errors import ModelLoadError


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``; empty if the file does not exist.

    Raises:
        ModelLoadError: the file contains something else.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content
