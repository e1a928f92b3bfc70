"""The processor of this machine, by name, and which of its instructions kernels may use."""

from __future__ import annotations

import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# Instructions that affect the speed of a model, by Linux's names.
_RELEVANT = (
    "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni",
    "amx_tile", "amx_int8", "amx_bf16", "amx_fp16",
    "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip


def this_processor() -> tuple[str, list[str]]:
    """Return name and instructions, as Linux reports them; no instructions if it does not."""
    try:
        return read_cpuinfo(_CPUINFO.read_text(errors="replace"))
    except OSError:
        return platform.processor(), []


def read_cpuinfo(text: str) -> tuple[str, list[str]]:
    """Return name and instructions of the first processor in Linux's report; "" for a missing name."""
    fields: dict[str, str] = {}
    for line in text.partition("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return fields.get("model name", ""), [flag for flag in _RELEVANT if flag in flags]
