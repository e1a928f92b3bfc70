"""``python -m penstock.ops.lab.kernels_wheel --out dist``: builds the wheels of ``penstock-kernels``.

A wheel has the library of ``kernels/native`` for each instruction set of an architecture (``kernels/native/ahead.py``).
zig, which is the package ``ziglang``, compiles it for glibc 2.28 on any machine, without a C++ library.
``auditwheel`` checks the result. Compiling takes one to two minutes of CPU time for each set with AVX-512, and half a
minute for others; zig caches results.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ...kernels.native.ahead import INSTRUCTION_SETS, MANIFEST, PACKAGE, InstructionSet
from ...kernels.native.build import FLAGS, compile_library, sources_digest
from ...kernels.native.library import exported_names
from ...shared.values.distribution import KERNELS_NAME, NAME, VERSION

_ROOT = Path(__file__).resolve().parents[2]
_GLIBC = (2, 28)
_AVX512_VNNI = "x86_64_v4+avx512vnni"
# zig's names of processors: the level of an architecture, and further instructions.
_PROCESSORS = {
    "amx": f"{_AVX512_VNNI}+avx512bf16+amx_tile+amx_bf16+amx_int8",
    "avx512_bf16": f"{_AVX512_VNNI}+avx512bf16",
    "avx512_vnni": _AVX512_VNNI,
    "avx512": "x86_64_v4",
    "avx2": "x86_64_v3",
    "neon_bf16": "generic+lse+dotprod+bf16+i8mm",
    "neon": "generic",
}
# Clang would split vectors of 64 bytes for x86_64_v4.
_WIDE_VECTORS = "-mprefer-vector-width=512"
# Templates of zig's C++ library then need nothing of it but the functions of the C source.
# For tests of the wheel, whose library then takes 30 s of CPU time instead of 50. zig does the same from -O1 on, and
# adds checks and debug information to code without optimisation.
_UNOPTIMISED = ("-O0", "-g0", "-fno-sanitize=all", "-fno-stack-protector")
_WITHOUT_CXX_LIBRARY = ("-fno-exceptions", "-fno-rtti", "-D_LIBCPP_VERBOSE_ABORT(...)=__builtin_abort()")
_RUNTIME = Path(__file__).with_name("kernels_runtime.c")
_PROJECT = f"""\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{KERNELS_NAME}"
version = "{VERSION}"
description = "CPU kernels of {NAME}, compiled ahead for each instruction set."
readme = "README.md"
requires-python = ">=3.11"
license = "Apache-2.0 AND (Apache-2.0 WITH LLVM-exception)"
license-files = ["LICENSE", "libcxx.LICENSE"]

[project.urls]
Repository = "https://github.com/penstock/penstock"

[tool.setuptools]
packages = ["{PACKAGE}"]

[tool.setuptools.package-data]
{PACKAGE} = ["*.so", "{MANIFEST}", "py.typed"]
"""
_README = f"""\
The CPU kernels of [{NAME}](https://pypi.org/project/{NAME}/), compiled for each instruction set. Install the same
version of both. {NAME} selects the library for the processor when an engine starts, and needs no compiler then.
"""
# The files do not depend on Python, but on the platform.
_SETUP = """\
from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class Platform(Distribution):
    def has_ext_modules(self):
        return True


class AnyPython(bdist_wheel):
    def get_tag(self):
        return "py3", "none", "{platform}"


setup(distclass=Platform, cmdclass={{"bdist_wheel": AnyPython}})
"""
_BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


def build_wheels(words: Sequence[str] | None = None) -> int:
    """Build and check a wheel for each architecture; return 1 if ``auditwheel`` rejects one."""
    parser = argparse.ArgumentParser(prog="penstock.ops.lab.kernels_wheel", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the wheels")
    parser.add_argument("--only", choices=sorted(_PROCESSORS), help="test this instruction set alone: not optimised")
    options = parser.parse_args(words)
    sets = [each for each in INSTRUCTION_SETS if options.only in (None, each.name)]
    flags = (*FLAGS, *_UNOPTIMISED) if options.only else FLAGS
    options.out.mkdir(parents=True, exist_ok=True)
    problems = []
    for machine in dict.fromkeys(each.machine for each in sets):
        of_machine = [each for each in sets if each.machine == machine]
        wheel = build_wheel(of_machine, machine, options.out.absolute(), flags)
        print(wheel.name, f"{wheel.stat().st_size / 1e6:.1f} MB", flush=True)
        problems += audit(wheel, machine)
    print(*problems, sep="\n", file=sys.stderr, end="" if not problems else "\n")
    return int(bool(problems))


def build_wheel(sets: Sequence[InstructionSet], machine: str, out: Path, flags: Sequence[str]) -> Path:
    """Compile the libraries, and return the path of the wheel that has them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        package = folder / PACKAGE
        package.mkdir()
        for each in sets:
            print(f"compiling {each.name}", file=sys.stderr, flush=True)
            compile_for(each, package / each.file, folder, flags)
        (package / "__init__.py").write_text(f'"""Compiled CPU kernels of {NAME}."""\n')
        (package / "py.typed").touch()
        (package / MANIFEST).write_text(json.dumps({"version": VERSION, "sources": sources_digest()}) + "\n")
        (folder / "LICENSE").write_bytes((_ROOT / "LICENSE").read_bytes())
        (folder / "libcxx.LICENSE").write_bytes((_zig_folder() / "lib" / "libcxx" / "LICENSE.TXT").read_bytes())
        (folder / "README.md").write_text(_README)
        (folder / "pyproject.toml").write_text(_PROJECT)
        (folder / "setup.py").write_text(_SETUP.format(platform=_platform(machine)))
        command = [sys.executable, "-c", _BUILD, str(out)]
        output = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout
        return out / output.split()[-1]


def compile_for(instructions: InstructionSet, path: Path, folder: Path, flags: Sequence[str]) -> None:
    """Compile the library for one instruction set; ``folder`` is for temporary files."""
    # Other libraries of the process must not replace functions of the C source, such as operator new.
    exports = folder / "exports.txt"
    exports.write_text(f"{{ global: {'; '.join(exported_names())}; local: *; }};\n")
    target = f"{instructions.machine}-linux-gnu.{'.'.join(map(str, _GLIBC))}"
    zig = str(_zig_folder() / "zig")
    compiler = [zig, "c++", "-target", target, f"-mcpu={_PROCESSORS[instructions.name]}", *flags]
    compiler += _WITHOUT_CXX_LIBRARY
    if "avx512f" in instructions.flags:
        compiler.append(_WIDE_VECTORS)
    # zig compiles its own runtime for the processor that it links for; without one it does so once.
    linker = [zig, "cc", "-target", target, "-s", "-Wl,-z,defs", f"-Wl,--version-script={exports}"]
    compile_library(compiler, path, [*linker, str(_RUNTIME), "-lm"])


def audit(wheel: Path, machine: str) -> list[str]:
    """Return why ``auditwheel`` does not accept the wheel's platform; nothing if it does."""
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    words = " ".join(result.stdout.split())
    # The oldest glibc that the libraries run with.
    platform_match = re.search(rf'following platform tag: "manylinux_(\d+)_(\d+)_{machine}"', words)
    is_old_enough = platform_match is not None and (int(platform_match[1]), int(platform_match[2])) <= _GLIBC
    return [] if result.returncode == 0 and is_old_enough else [f"{wheel.name}: {words}"]


def _platform(machine: str) -> str:
    return f"manylinux_{'_'.join(map(str, _GLIBC))}_{machine}"


def _zig_folder() -> Path:
    spec = find_spec("ziglang")
    if spec is None or spec.origin is None:
        sys.exit("zig is not installed; run `make dist`, or pip install ziglang")
    return Path(spec.origin).parent


if __name__ == "__main__":
    sys.exit(build_wheels())
