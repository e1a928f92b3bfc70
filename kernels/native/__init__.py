"""Kernels for the CPU in C++, compiled once per machine when an engine starts, if a compiler is installed.

The references run until ``load`` has succeeded, and for inputs that the library does not support.
"""

from __future__ import annotations

from .library import Library, is_loaded, library, load, loaded, num_threads, set_num_threads, unload

__all__ = ["Library", "is_loaded", "library", "load", "loaded", "num_threads", "set_num_threads", "unload"]
