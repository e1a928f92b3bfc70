"""The compiled library in this process: its functions by dtype."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import torch

from .build import BuildError, build, default_cache_folder

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_ANY_DTYPE: dict[str, list[Any]] = {
    "set_num_threads": [_INT],
    "get_num_threads": [],
    "ask_for_tiles": [],
    "instructions": [],
    "meet": [_POINTER, _INT, _INT, _INT, _INT],
    "store_rows": [_POINTER, _INT, _POINTER, _POINTER, _INT, _INT],
}
_SIGNATURES: dict[str, list[Any]] = {
    "rms_norm": [_POINTER, _INT, _POINTER, _POINTER, _INT, _INT, _POINTER, _INT, _INT, _FLOAT],
    "rotary": [_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT, _INT],
    "silu_and_mul": [_POINTER, _POINTER, _INT, _INT],
    "pack_linear": [_POINTER, _POINTER, _INT, _INT],
    "quantize_linear": [_POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT],
    "quantize_linear_to_nibbles": [_POINTER, _POINTER, _POINTER, _POINTER, _INT, _INT],
    "linear": [_POINTER, _INT, _POINTER, _POINTER, _INT],
    "add_adapters": [_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _INT],
    "sample": [_POINTER, _INT, *(_POINTER,) * 6, _INT, _INT],
    "decode": [
        *(_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _POINTER),
        *(_INT, _INT, _INT, _INT, _INT, _FLOAT, _POINTER),
    ],
    "run_decoder": [_POINTER, _POINTER, _INT],
    "mix": [_POINTER, _POINTER, _POINTER, _INT, _POINTER, _INT],
}

_NO_TILES = -1

Function = Any  # of ctypes


class Library:
    """Its functions, by name and, where it matters, by the dtype of their tensors.

    They take addresses and sizes as the sources in this folder say, and check nothing: the wrappers do.

    Attributes:
        instructions: of the processor, which the products are made of: "amx", "avx512_bf16", "avx512", "avx2", …
        tiles_refusal: why the kernel does not let this process use the processor's tile registers; empty if it does,
            or there are none.
    """

    def __init__(self, path: Path, *, uses_tiles: bool) -> None:
        loaded = ctypes.CDLL(str(path))
        self._functions: dict[tuple[str, torch.dtype | None], Function] = {}
        for name, signature in _ANY_DTYPE.items():
            self._functions[name, None] = getattr(loaded, name)
            self._functions[name, None].argtypes = signature
        for name, signature in _SIGNATURES.items():
            for dtype, suffix in _SUFFIXES.items():
                self._functions[name, dtype] = getattr(loaded, f"{name}_{suffix}")
                self._functions[name, dtype].argtypes = signature
        refusal = loaded.ask_for_tiles() if uses_tiles else _NO_TILES
        self.tiles_refusal = os.strerror(refusal) if refusal not in (0, _NO_TILES) else ""
        loaded.instructions.restype = ctypes.c_char_p
        self.instructions: str = loaded.instructions().decode()

    def get(self, name: str, dtype: torch.dtype | None) -> Function | None:
        """The function; None for a dtype that the library does not know."""
        return self._functions.get((name, dtype))


_library: Library | None = None


def load(cache_folder: Path | None = None, *, emulates_tiles: bool = False, uses_tiles: bool = True) -> str | None:
    """Compile the library if need be, and use it from now on in this process.

    Returns None, or why it cannot be had: then everything runs on the references.

    Args:
        emulates_tiles: see ``build``.
        uses_tiles: False leaves them alone, to see what they do; not once this process had them from the library.
    """
    global _library  # a process has one processor; every kernel asks for the same library
    try:
        path = build(cache_folder or default_cache_folder(), emulates_tiles=emulates_tiles)
        _library = Library(path, uses_tiles=uses_tiles)
    except (BuildError, OSError) as error:
        return str(error)
    return None


def unload() -> None:
    """Use the references again."""
    global _library  # see load
    _library = None


def is_loaded() -> bool:
    return _library is not None


def loaded() -> Library | None:
    """The library in use."""
    return _library


def set_num_threads(num_threads: int) -> None:
    """Threads that compute, the calling one included; they are the library's own, apart from torch's."""
    function = library("set_num_threads")
    if function is not None:
        function(num_threads)


def num_threads() -> int:
    """Threads that compute; 1 without the library."""
    function = library("get_num_threads")
    return 1 if function is None else function()


def library(name: str, dtype: torch.dtype | None = None) -> Function | None:
    """The compiled function, or None if the reference has to do."""
    return None if _library is None else _library.get(name, dtype)
