"""Compile the sources of this folder into a shared library, which is cached between runs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

_FOLDER = Path(__file__).parent
_SOURCES = (
    "attention/attention.cpp",
    "attention/cache.cpp",
    "base/barrier.cpp",
    "base/parallel.cpp",
    "decoder/adapters.cpp",
    "decoder/decoder.cpp",
    "decoder/experts.cpp",
    "decoder/layer_ops.cpp",
    "decoder/mixers.cpp",
    "decoder/sampling.cpp",
    "products/block_product.cpp",
    "products/instructions.cpp",
    "products/linear.cpp",
    "products/tile_product.cpp",
    "products/tiles.cpp",
    "weights/packing.cpp",
)
# Products and sums may be fused, but sums are not reordered, so that a row has the same bits in every loop.
FLAGS = (
    "-O3",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-signed-zeros",
    "-fopenmp-simd",
    "-std=c++17",
    "-pthread",
    "-fPIC",
    # Vectors of 64 bytes are passed in memory by processors without such registers. All callers are compiled alike.
    "-Wno-psabi",
)
# Emulates tile registers in plain C++, so that machines without them can test the code that uses them.
# Compiled in less time than -O3 takes. Without the last flag, products and sums would not be fused, which changes bits.
_EMULATED_TILES = ("-DPENSTOCK_EMULATED_TILES", "-O1", "-fexpensive-optimizations")
# Environment variable for the compiler's -march, to use fewer instructions than this processor has, such as x86-64-v3
# for AVX2 only.
PROCESSOR = "PENSTOCK_NATIVE_MARCH"
_COMPILERS = ("c++", "g++", "clang++")
# Compilers rarely hang, but two slow cores with other work took more than ten minutes for one call of zig.
_TIMEOUT_S = 3600


class BuildError(Exception):
    """The library cannot be compiled here; the message gives the reason."""


def build(cache_folder: Path, *, emulates_tiles: bool = False) -> Path:
    """Return the path of the library; compile it if it is not in ``cache_folder``, in about 30 s of CPU time.

    The file name is a hash of sources, flags, compiler, and the instructions of this processor. One process compiles,
    and other processes that need the same library wait for it.

    Args:
        emulates_tiles: compute products with the same bits as on a processor with tile registers, slowly.

    Raises:
        BuildError: no compiler is installed, or it fails.
    """
    compiler, path = _compiler(emulates_tiles), library_path(cache_folder, emulates_tiles=emulates_tiles)
    if path.is_file():
        return path
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            # If files cannot be locked, each process compiles, and the last one replaces the same file.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                compile_library(compiler, path)
    except OSError as error:
        raise BuildError(f"{cache_folder} cannot be written: {error}") from error
    return path


def library_path(cache_folder: Path, *, emulates_tiles: bool = False) -> Path:
    """Return the path at which ``build`` has the library, or will have it.

    Raises:
        BuildError: no compiler is installed, or it fails.
    """
    return cache_folder / f"penstock-{_key(_compiler(emulates_tiles))}.so"


def _compiler(emulates_tiles: bool) -> list[str]:
    processor = os.environ.get(PROCESSOR) or "native"
    return [_find_compiler(), *FLAGS, f"-march={processor}", *(_EMULATED_TILES if emulates_tiles else ())]


def compile_library(compiler: Sequence[str], path: Path, linker: Sequence[str] | None = None) -> None:
    """Compile the sources with a compiler command, and replace ``path`` with the library.

    Args:
        linker: command that links the objects; None for the compiler.

    Raises:
        BuildError: the compiler fails.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        library = Path(folder) / "library.so"
        with ThreadPoolExecutor() as compilers:
            objects = list(compilers.map(partial(_compile_source, compiler, Path(folder)), _SOURCES))
        _run([*(linker or compiler), "-shared", *objects, "-o", str(library)])
        library.replace(path)


def _compile_source(compiler: Sequence[str], folder: Path, source: str) -> str:
    target = str(folder / f"{Path(source).name}.o")
    _run([*compiler, f"-I{_FOLDER}", "-c", str(_FOLDER / source), "-o", target])
    return target


def default_cache_folder() -> Path:
    """Return the folder for libraries in the user's cache."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "penstock" / "native"


def _find_compiler() -> str:
    requested = os.environ.get("CXX")
    for name in (requested,) if requested else _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise BuildError(f"no C++ compiler ({requested or ', '.join(_COMPILERS)}) is on the PATH")


def _key(compiler: list[str]) -> str:
    digest = hashlib.sha256(" ".join(compiler[1:]).encode())
    digest.update(_compiler_version(compiler[0]))
    digest.update(platform.machine().encode())
    digest.update(processor_flags())
    digest.update(sources_digest().encode())
    return digest.hexdigest()[:24]


@cache
def sources_digest() -> str:
    """Return a hash of the sources and of the flags that affect results, as 24 hexadecimal digits."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted(path for path in _FOLDER.rglob("*") if path.suffix in (".h", ".cpp")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


@cache
def _compiler_version(compiler: str) -> bytes:
    """Return the output of ``--version``, cached since a process may load the library for many engines."""
    return _run([compiler, "--version"])


def processor_flags() -> bytes:
    """Return the processor's features, because unlike machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


def _run(command: Sequence[str]) -> bytes:
    try:
        return subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S).stdout
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        raise BuildError(f"{command[0]} failed: {lines[0] if lines else error}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
