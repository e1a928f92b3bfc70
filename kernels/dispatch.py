"""Choose the implementation of a kernel, and the error of wrong arguments.

A kernel's wrapper lists its implementations by device type. ``REFERENCE`` is always among them and runs on any device.
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
# Backends that a caller may request instead of the device's own, and their keys in a table of implementations.
BACKENDS = {"triton": "cuda", NATIVE: "cpu", "reference": REFERENCE}
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Implementation = Callable[..., Any]

log = logging.getLogger(__name__)


class KernelInputError(ValueError):
    """An argument has a shape, dtype or stride that the kernel does not support; the message names the argument."""


class OnGpu:
    """An implementation in Triton. The first call on a GPU imports it, because importing Triton takes half a second.

    Args:
        module: module of the implementation.
        name: name of the function in ``module``.
        dtypes: supported dtypes; the reference runs for others.
    """

    def __init__(self, module: str, name: str, dtypes: tuple[torch.dtype, ...] = TRITON_DTYPES) -> None:
        self._module = module
        self._name = name
        self._dtypes = dtypes

    def choose(self, dtype: torch.dtype, reference: Implementation) -> Implementation:
        """Return the function; if it cannot run, log the reason once and return ``reference``."""
        if dtype not in self._dtypes:
            warn_once(f"{self._module}.{self._name} does not support {dtype}: the reference runs instead")
            return reference
        try:
            return getattr(importlib.import_module(self._module), self._name)
        except ImportError as error:
            warn_once(
                f"{self._module} cannot be imported ({error}): the reference runs instead; "
                "to install Triton: pip install 'penstock-llm[gpu]'"
            )
            return reference


def select(
    implementations: Mapping[str, Implementation | OnGpu],
    device: torch.device,
    dtype: torch.dtype,
    backend: str = AUTO,
) -> Implementation:
    """Return the implementation for ``device`` and ``dtype``, or the reference if there is none.

    Args:
        backend: ``AUTO``, or one of ``BACKENDS`` to use on any device.
    """
    reference = implementations[REFERENCE]
    assert not isinstance(reference, OnGpu)
    key = device.type if backend == AUTO else BACKENDS[backend]
    chosen = implementations.get(key, reference)
    return chosen.choose(dtype, reference) if isinstance(chosen, OnGpu) else chosen


@cache
def warn_once(text: str) -> None:
    """Log a warning unless this process has logged the same text before."""
    log.warning("reference_kernel_used", extra={"reason": text})
