"""Libraries of the package ``penstock-kernels``, which are compiled ahead, one per instruction set.

``ops/lab/kernels_wheel.py`` builds the package from the sources in this folder.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from .build import PROCESSOR, processor_flags, sources_digest

PACKAGE = "penstock_kernels"
# JSON with the keys "version" of the package and "sources", which is ``sources_digest`` of its build.
MANIFEST = "manifest.json"

_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AVX512_VNNI = _AVX512 | {"avx512_vnni"}
_AVX512_BF16 = _AVX512_VNNI | {"avx512_bf16"}
_AMX = _AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"}
_NEON = frozenset({"asimd"})
_NEON_BF16 = _NEON | {"atomics", "asimddp", "bf16", "i8mm"}


@dataclass(frozen=True)
class InstructionSet:
    """Instructions that a library of the package uses.

    Attributes:
        machine: the processor's architecture, as ``platform.machine`` returns it.
        flags: the instructions by Linux's names.
    """

    name: str
    machine: str
    flags: frozenset[str]

    @property
    def file(self) -> str:
        return f"{self.name}.so"


# For each architecture the best one is first.
INSTRUCTION_SETS = (
    InstructionSet("amx", "x86_64", _AMX),
    InstructionSet("avx512_bf16", "x86_64", _AVX512_BF16),
    InstructionSet("avx512_vnni", "x86_64", _AVX512_VNNI),
    InstructionSet("avx512", "x86_64", _AVX512),
    InstructionSet("avx2", "x86_64", _AVX2),
    InstructionSet("neon_bf16", "aarch64", _NEON_BF16),
    InstructionSet("neon", "aarch64", _NEON),
)


def find_library() -> Path | None:
    """Return the package's best library for this processor.

    None if the package is not installed or is stale, if it has no library for this processor, or if the environment
    variable for the compiler's -march selects the instructions.
    """
    folder = _find_folder()
    if folder is None or os.environ.get(PROCESSOR) or _read_manifest(folder)["sources"] != sources_digest():
        return None
    flags = processor_flags().decode().partition(":")[2].split()
    paths = (folder / each.file for each in usable_sets(platform.machine(), flags))
    return next((path for path in paths if path.is_file()), None)


def stale_version() -> str | None:
    """Return the version of an installed package that was built from other sources than these; None if there is none.

    ``load`` ignores such a package.
    """
    folder = _find_folder()
    if folder is None:
        return None
    manifest = _read_manifest(folder)
    return None if manifest["sources"] == sources_digest() else manifest["version"]


def usable_sets(machine: str, flags: list[str]) -> list[InstructionSet]:
    """Return the instruction sets that a processor with ``flags`` has, the best first."""
    return [each for each in INSTRUCTION_SETS if each.machine == machine and each.flags <= set(flags)]


def _find_folder() -> Path | None:
    spec = find_spec(PACKAGE)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _read_manifest(folder: Path) -> dict[str, str]:
    return json.loads((folder / MANIFEST).read_text())
