"""What a kernel raises when it is called wrongly."""

from __future__ import annotations


class KernelInputError(ValueError):
    """An argument has a shape, dtype or stride that the kernel does not take; the message names it."""
