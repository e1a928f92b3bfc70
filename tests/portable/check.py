"""``make portable``: the compiled kernels for processors that this one is not.

For AVX2 alone the kernels' tests run here. For Arm the library is cross-compiled and ``driver.cpp`` calls it under
qemu; its numbers are compared with those of this processor's library, which the tests hold to the references. Missing
programs are reported, and their part is skipped. Compiling takes about a minute of processor time for each.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from penstock.kernels.native import build as native_build

_DRIVER = Path(__file__).parent / "driver.cpp"
_SOURCES = Path(native_build.__file__).parent
_AVX2 = "x86-64-v3"
_TESTS = (
    "test_native.py",
    "test_native_linear.py",
    "test_blocks.py",
    "test_tiles.py",
    "test_sampling.py",
    "test_mixers.py",
)
# Before Graviton 3 there are no products of bfloat16.
_ARM = {"armv8.2-a": "neon", "armv8.6-a+bf16": "neon_bf16"}
_ARM_COMPILER = "aarch64-linux-gnu-g++"
# Debian's qemu-user and qemu-user-static.
_EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")
_ARM_ROOT = "/usr/aarch64-linux-gnu"
# Of the difference, relative to all numbers of a line. Sums are made in another order, and bfloat16 rounds after each
# operation; of two fours of bits that are equally near, each processor may take another.
_BOUNDS = {"float32": 1e-4, "bfloat16": 0.04}


def main() -> int:
    """Return how many of the processors failed."""
    failed = [name for name, check in (("AVX2", _check_avx2), ("Arm", _check_arm)) if not check()]
    print(f"failed: {', '.join(failed)}" if failed else "portable")
    return len(failed)


def _check_avx2() -> bool:
    if platform.machine() != "x86_64":
        print("AVX2: skipped, this is no x86-64")
        return True
    tests = [str(Path(__file__).parents[1] / "kernels" / name) for name in _TESTS]
    environment = {**os.environ, native_build.PROCESSOR: _AVX2}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, env=environment, check=False).returncode == 0


def _check_arm() -> bool:
    emulator = next((name for name in _EMULATORS if shutil.which(name)), None)
    if emulator is None or shutil.which(_ARM_COMPILER) is None:
        missing = [*([] if emulator else [_EMULATORS[0]]), *([] if shutil.which(_ARM_COMPILER) else [_ARM_COMPILER])]
        print(f"Arm: skipped, not installed: {', '.join(missing)} (Debian: g++-aarch64-linux-gnu, qemu-user)")
        return True
    with tempfile.TemporaryDirectory() as folder:
        compiler = os.environ.get("CXX") or "c++"
        expected = _run_driver(Path(folder) / "here", compiler, "native", [])
        agreed = [_agrees(march, name, expected, Path(folder), emulator) for march, name in _ARM.items()]
    return all(agreed)


def _agrees(march: str, name: str, expected: list[str], folder: Path, emulator: str) -> bool:
    lines = _run_driver(folder / name, _ARM_COMPILER, march, [emulator, "-cpu", "max", "-L", _ARM_ROOT])
    wrong = [] if lines[:1] == [f"instructions {name}"] else [f"{lines[:1]} instead of the instructions {name}"]
    wrong += [] if len(lines) == len(expected) else [f"{len(lines)} lines instead of {len(expected)}: {lines[-1:]}"]
    for line, expected_line in zip(lines[1:], expected[1:], strict=False):
        difference = _difference(line, expected_line)
        if difference:
            wrong.append(difference)
    print(f"Arm, {march}: {len(lines)} results" + "".join(f"\n  {problem}" for problem in wrong))
    return not wrong


def _run_driver(program: Path, compiler: str, march: str, emulator: list[str]) -> list[str]:
    os.environ["CXX"], os.environ[native_build.PROCESSOR] = compiler, march
    library = native_build.build(native_build.default_cache_folder())
    options = [
        "-std=c++17",
        "-O1",
        "-fopenmp-simd",
        "-Wall",
        "-Wextra",
        "-Wno-psabi",
        # Tensors that a model does without are zero, so the driver names the fields that it has.
        "-Wno-missing-field-initializers",
        f"-march={march}",
        f"-I{_SOURCES}",
    ]
    linked = [str(library), f"-Wl,-rpath,{library.parent}", "-pthread"]
    subprocess.run([compiler, *options, str(_DRIVER), *linked, "-o", str(program)], check=True)
    result = subprocess.run([*emulator, str(program)], stdout=subprocess.PIPE, text=True, check=False)
    return [*result.stdout.splitlines(), *([f"ended with {result.returncode}"] if result.returncode else [])]


def _difference(line: str, expected_line: str) -> str:
    (how, dtype, name, *numbers), expected = line.split(), expected_line.split()
    if [how, dtype, name] != expected[:3] or len(numbers) != len(expected) - 3:
        return f"{line[:60]} instead of {expected_line[:60]}"
    if how == "same":
        return "" if line == expected_line else f"{dtype} {name}: other numbers"
    values, truth = [float(number) for number in numbers], [float(number) for number in expected[3:]]
    relative = math.dist(values, truth) / math.hypot(*truth)
    return "" if relative <= _BOUNDS[dtype] else f"{dtype} {name}: differs by {relative:.2g}"


if __name__ == "__main__":
    sys.exit(main())
