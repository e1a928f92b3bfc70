"""Kernels for the CPU in C++: from the package ``penstock-kernels``, or compiled once per machine by its compiler.

The references run until ``load`` has succeeded, and for inputs that the library does not support.
"""

from __future__ import annotations

from .ahead import stale_version
from .library import Library, is_loaded, library, load, loaded, needs_compiling, num_threads, set_num_threads, unload

__all__ = [
    "Library",
    "is_loaded",
    "library",
    "load",
    "loaded",
    "needs_compiling",
    "num_threads",
    "set_num_threads",
    "stale_version",
    "unload",
]
