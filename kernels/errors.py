"""The error of a kernel that is called with wrong arguments."""

from __future__ import annotations


class KernelInputError(ValueError):
    """An argument has a shape, dtype or stride that the kernel does not support; the message names the argument."""
