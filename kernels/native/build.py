"""Compiles the sources of this folder into a shared library that is kept from run to run."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

_FOLDER = Path(__file__).parent
_SOURCES = (
    *(
        "layer_ops.cpp",
        "attention.cpp",
        "cache.cpp",
        "packing.cpp",
        "linear.cpp",
        "decoder.cpp",
        "parallel.cpp",
        "sampling.cpp",
    ),
    *("tile_product.cpp", "tiles.cpp", "instructions.cpp", "adapters.cpp", "mixers.cpp", "experts.cpp", "meeting.cpp"),
)
# Products and sums may be fused, but no sum is rearranged: a row has the same bits in every loop that computes it.
_FLAGS = (
    *("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),
    # Vectors of 64 bytes are passed in memory where no register is as large: all callers are compiled alike.
    *("-fopenmp-simd", "-std=c++17", "-pthread", "-fPIC", "-Wno-psabi"),
)
# Tile registers in plain C++, so that a machine without them tests what computes with them.
_EMULATED_TILES = "-DPENSTOCK_EMULATED_TILES"
# What the compiler's -march says: less than this processor has, such as x86-64-v3 for AVX2 alone.
PROCESSOR = "PENSTOCK_NATIVE_MARCH"
_COMPILERS = ("c++", "g++", "clang++")
# A busy machine takes ten times as long as an idle one.
_TIMEOUT_S = 600


class BuildError(Exception):
    """The library cannot be compiled here; the message says why."""


def build(cache_folder: Path, *, emulates_tiles: bool = False) -> Path:
    """Return the library, compiled now unless it is in ``cache_folder`` already. Takes about 25 s of a processor.

    A library is found by what it was made from: sources, flags, compiler, and the instructions of this processor. One
    process compiles it, and others that want the same wait for that.

    Args:
        emulates_tiles: products are computed as on a processor with tile registers, bit by bit, and slowly.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    processor = os.environ.get(PROCESSOR) or "native"
    compiler = [_find_compiler(), *_FLAGS, f"-march={processor}", *([_EMULATED_TILES] if emulates_tiles else [])]
    path = cache_folder / f"penstock-{_key(compiler)}.so"
    if path.is_file():
        return path
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            # Where files cannot be locked each compiles: whoever comes last wins, and all have the same.
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                _make(compiler, path)
    except OSError as error:
        raise BuildError(f"{cache_folder} cannot be written: {error}") from error
    return path


def _make(compiler: list[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / "library.so"
        with ThreadPoolExecutor() as compilers:
            objects = list(compilers.map(partial(_compile, compiler, Path(folder)), _SOURCES))
        _run([*compiler, "-shared", *objects, "-o", str(made)])
        made.replace(path)


def _compile(compiler: list[str], folder: Path, source: str) -> str:
    made = str(folder / f"{source}.o")
    _run([*compiler, "-c", str(_FOLDER / source), "-o", made])
    return made


def default_cache_folder() -> Path:
    """Where the user's programs keep what can be made again."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "penstock" / "native"


def _find_compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return found
    raise BuildError(f"no C++ compiler ({wanted or ', '.join(_COMPILERS)}) is on the PATH")


def _key(compiler: list[str]) -> str:
    digest = hashlib.sha256(" ".join(compiler[1:]).encode())
    digest.update(_version_of(compiler[0]))
    digest.update(platform.machine().encode())
    digest.update(_processor_flags())
    for source in sorted(path for path in _FOLDER.iterdir() if path.suffix in (".h", ".cpp")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


@cache
def _version_of(compiler: str) -> bytes:
    """Asked once: a process may load the library for many engines."""
    return _run([compiler, "--version"])


def _processor_flags() -> bytes:
    """What ``-march=native`` depends on; a cache folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


def _run(command: list[str]) -> bytes:
    try:
        return subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S).stdout
    except subprocess.CalledProcessError as error:
        told = error.stderr.decode(errors="replace").strip().splitlines()
        raise BuildError(f"{command[0]} failed: {told[0] if told else error}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} failed: {error}") from error
