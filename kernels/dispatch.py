"""Chooses which implementation of a kernel runs.

A kernel's wrapper lists its implementations by device type; ``REFERENCE`` is always there and runs everywhere.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

REFERENCE = "reference"
AUTO = "auto"
NATIVE = "native"
# What a caller may ask for instead of what its device suggests, and where that stands in a table of implementations.
BACKENDS = {"triton": "cuda", NATIVE: "cpu", "reference": REFERENCE}
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Implementation = Callable[..., Any]

log = logging.getLogger(__name__)


class OnGpu:
    """An implementation in Triton, imported when a tensor on a GPU first asks for it: Triton alone takes half a second.

    Args:
        module: where it is.
        name: of the function there.
        dtypes: it takes; for others the reference runs.
    """

    def __init__(self, module: str, name: str, dtypes: tuple[torch.dtype, ...] = TRITON_DTYPES) -> None:
        self._module = module
        self._name = name
        self._dtypes = dtypes

    def choose(self, dtype: torch.dtype, reference: Implementation) -> Implementation:
        """Return the function, or ``reference`` where it cannot run; why is logged once."""
        if dtype not in self._dtypes:
            tell_once(f"{self._module}.{self._name} does not take {dtype}: the reference runs instead")
            return reference
        try:
            return getattr(importlib.import_module(self._module), self._name)
        except ImportError as error:
            tell_once(f"{self._module} cannot be imported ({error}): the reference runs instead; install penstock[gpu]")
            return reference


def select(
    implementations: Mapping[str, Implementation | OnGpu],
    device: torch.device,
    dtype: torch.dtype,
    backend: str = AUTO,
) -> Implementation:
    """Return the implementation for ``device`` and ``dtype``: the one made for them, else the reference.

    Args:
        backend: one of ``BACKENDS`` to have that one, whatever the device.
    """
    reference = implementations[REFERENCE]
    assert not isinstance(reference, OnGpu)
    place = device.type if backend == AUTO else BACKENDS[backend]
    chosen = implementations.get(place, reference)
    return chosen.choose(dtype, reference) if isinstance(chosen, OnGpu) else chosen


@cache
def tell_once(text: str) -> None:
    """Log a warning that this process has not logged before."""
    log.warning("reference_kernel_used", extra={"reason": text})
