"""Compiles the sources of this folder into a shared library that is kept from run to run."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

_FOLDER = Path(__file__).parent
_SOURCES = ("layer_ops.cpp", "attention.cpp", "cache.cpp", "linear.cpp", "decoder.cpp", "parallel.cpp", "sampling.cpp")
_HEADERS = ("scalar.h", "lanes.h", "parallel.h", "linear.h", "decoder.h", "decoder_attention.h")
# Products and sums may be fused, but no sum is rearranged: a row has the same bits in every loop that computes it.
_FLAGS = (
    *("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros"),
    *("-fopenmp-simd", "-std=c++17", "-pthread", "-fPIC"),
)
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_S = 120


class BuildError(Exception):
    """The library cannot be compiled here; the message says why."""


def build(cache_folder: Path) -> Path:
    """Return the library, compiled now unless it is in ``cache_folder`` already. Takes about six seconds.

    A library is found by what it was made from: sources, flags, compiler, and the instructions of this processor.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    compiler = _find_compiler()
    path = cache_folder / f"penstock-{_key(compiler)}.so"
    if path.is_file():
        return path
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder) as folder:
            made = Path(folder) / "library.so"
            with ThreadPoolExecutor() as compilers:
                objects = list(compilers.map(partial(_compile, compiler, Path(folder)), _SOURCES))
            _run([compiler, *_FLAGS, "-shared", *objects, "-o", str(made)])
            # Another engine may be at it, too: whoever comes last wins, and both have the same.
            made.replace(path)
    except OSError as error:
        raise BuildError(f"{cache_folder} cannot be written: {error}") from error
    return path


def _compile(compiler: str, folder: Path, source: str) -> str:
    made = str(folder / f"{source}.o")
    _run([compiler, *_FLAGS, "-c", str(_FOLDER / source), "-o", made])
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


def _key(compiler: str) -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    digest.update(_run([compiler, "--version"]))
    digest.update(platform.machine().encode())
    digest.update(_processor_flags())
    for name in (*_HEADERS, *_SOURCES):
        digest.update((_FOLDER / name).read_bytes())
    return digest.hexdigest()[:24]


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
