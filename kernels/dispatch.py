"""Chooses which implementation of a kernel runs.

A kernel's wrapper lists its implementations by device type; ``REFERENCE`` is always there and runs everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

REFERENCE = "reference"


def select(implementations: Mapping[str, Callable[..., Any]], device: torch.device) -> Callable[..., Any]:
    """Return the implementation for ``device``: the one made for its type, else the reference."""
    return implementations.get(device.type) or implementations[REFERENCE]
