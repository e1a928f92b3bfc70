"""Kernels for the CPU in C++: compiled where a compiler is, at the start of an engine, once per machine.

Until ``load`` has succeeded, and for inputs that the library does not know, the references run.
"""

from __future__ import annotations

from .library import Library, is_loaded, library, load, loaded, num_threads, set_num_threads, unload

__all__ = ["Library", "is_loaded", "library", "load", "loaded", "num_threads", "set_num_threads", "unload"]
