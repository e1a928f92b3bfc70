"""An engine's description of the processor that it computes on."""

from __future__ import annotations

import pytest

from penstock.shared.process.processor import read_cpuinfo
from penstock.worker.engine.setup.host import processor

XEON = """processor	: 0
vendor_id	: GenuineIntel
model name	: Intel(R) Xeon(R) Processor
flags		: fpu vme sse2 fma avx2 avx512f avx512_bf16 amx_tile amx_bf16

processor	: 1
model name	: another
flags		: avx2
"""
ARM = """processor	: 0
BogoMIPS	: 50.00
Features	: fp asimd evtstrm asimddp i8mm bf16
CPU implementer	: 0x41
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (XEON, ("Intel(R) Xeon(R) Processor", ["avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"])),
        (ARM, ("", ["asimd", "asimddp", "i8mm", "bf16"])),
        ("", ("", [])),
    ],
)
def test_linux_data_of_the_first_processor(text: str, expected: tuple[str, list[str]]) -> None:
    assert read_cpuinfo(text) == expected


def test_this_machine_has_one() -> None:
    name, instructions = processor("cpu")
    assert isinstance(name, str)
    assert len(instructions) == len({*instructions})
