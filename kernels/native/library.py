"""The compiled library of this process, with its functions by dtype."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import torch

from .ahead import find_library
from .build import BuildError, build, default_cache_folder, library_path

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_ANY_DTYPE: dict[str, list[Any]] = {
    "set_num_threads": [_INT],
    "get_num_threads": [],
    "request_tiles": [],
    "instructions": [],
    "wait_at_barrier": [_POINTER, _INT, _INT, _INT, _INT],
    "store_rows": [_POINTER, _INT, _POINTER, _POINTER, _INT, _INT],
}
_SIGNATURES: dict[str, list[Any]] = {
    "rms_norm": [_POINTER, _INT, _POINTER, _POINTER, _INT, _INT, _POINTER, _INT, _INT, _FLOAT],
    "rotary": [_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT],
    "silu_and_mul": [_POINTER, _POINTER, _INT, _INT],
    "pack_linear": [_POINTER, _POINTER, _INT, _INT],
    "quantize_linear": [_POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT],
    "quantize_linear_to_nibbles": [*[_POINTER] * 5, _INT, _INT],
    "rotate_rows": [_POINTER, _POINTER, _INT, _INT],
    "linear": [_POINTER, _INT, _POINTER, _POINTER, _INT],
    "add_adapters": [_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT],
    "sample": [_POINTER, _INT, *[_POINTER] * 6, _INT, _INT],
    "decode": [_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _POINTER, *[_INT] * 5, _FLOAT, _POINTER],
    "run_decoder": [_POINTER, _POINTER, _INT],
    "mix": [_POINTER, _POINTER, _POINTER, _INT, _POINTER, _INT],
}

_NO_TILES = -1

Function = Any  # of ctypes


class Library:
    """Functions of a compiled library, by name and by the dtype of their tensors; None for functions without a dtype.

    They take addresses and sizes, as the sources in this folder document, and check nothing. The wrappers do.

    Attributes:
        path: the file that it was loaded from.
        instructions: the best instructions that products use: "amx", "avx512_bf16", "avx512", "avx2", …
        tiles_refusal: reason why the kernel does not let this process use the processor's tile registers; empty if it
            does, or if the processor has none.
    """

    def __init__(self, path: Path, *, uses_tiles: bool) -> None:
        self.path = path
        dll = ctypes.CDLL(str(path))
        self._functions: dict[tuple[str, torch.dtype | None], Function] = {}
        for name, signature in _ANY_DTYPE.items():
            self._functions[name, None] = getattr(dll, name)
            self._functions[name, None].argtypes = signature
        for name, signature in _SIGNATURES.items():
            for dtype, suffix in _SUFFIXES.items():
                self._functions[name, dtype] = getattr(dll, f"{name}_{suffix}")
                self._functions[name, dtype].argtypes = signature
        refusal = dll.request_tiles() if uses_tiles else _NO_TILES
        self.tiles_refusal = os.strerror(refusal) if refusal not in (0, _NO_TILES) else ""
        dll.instructions.restype = ctypes.c_char_p
        self.instructions: str = dll.instructions().decode()

    def get(self, name: str, dtype: torch.dtype | None) -> Function | None:
        """Return the function; None for a dtype that the library does not support."""
        return self._functions.get((name, dtype))


def exported_names() -> list[str]:
    """Return the names of the functions that a library exports."""
    return [*_ANY_DTYPE, *(f"{name}_{suffix}" for name in _SIGNATURES for suffix in _SUFFIXES.values())]


_library: Library | None = None


def load(cache_folder: Path | None = None, *, emulates_tiles: bool = False, uses_tiles: bool = True) -> str | None:
    """Use the library in this process from now on.

    It comes from the package ``penstock-kernels`` if that is installed and fits. Otherwise it is compiled if necessary.

    Returns None, or the reason why the library is not available; the references run then.

    Args:
        cache_folder: folder of compiled libraries; the package is not used if it is given.
        emulates_tiles: see ``build``; the package is not used.
        uses_tiles: False does not use tile registers, to measure their effect. It has no effect once the library has
            enabled them in this process.
    """
    global _library  # a process has one processor, so all kernels use the same library
    try:
        path = None if cache_folder or emulates_tiles else find_library()
        if path is None:
            path = build(cache_folder or default_cache_folder(), emulates_tiles=emulates_tiles)
        _library = Library(path, uses_tiles=uses_tiles)
    except (BuildError, OSError) as error:
        return str(error)
    return None


def needs_compiling() -> bool:
    """Return whether ``load`` would compile the library, which takes half a minute of processor time."""
    try:
        return find_library() is None and not library_path(default_cache_folder()).is_file()
    except BuildError:
        return False


def unload() -> None:
    """Use the references again."""
    global _library  # see load
    _library = None


def is_loaded() -> bool:
    return _library is not None


def loaded() -> Library | None:
    """Return the library in use, or None."""
    return _library


def set_num_threads(num_threads: int) -> None:
    """Set the number of threads that compute, including the caller; they are separate from torch's."""
    function = library("set_num_threads")
    if function is not None:
        function(num_threads)


def num_threads() -> int:
    """Return the number of threads that compute; 1 without the library."""
    function = library("get_num_threads")
    return 1 if function is None else function()


def library(name: str, dtype: torch.dtype | None = None) -> Function | None:
    """Return the compiled function, or None if the reference has to run."""
    return None if _library is None else _library.get(name, dtype)
