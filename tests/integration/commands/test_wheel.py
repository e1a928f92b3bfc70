"""The wheels of ``make dist`` in a fresh environment: without a compiler, away from the clone.

Without ``PENSTOCK_DIST``, the folder of wheels to test, they are built here, and the one of the compiled kernels has a
single instruction set, not optimised.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from penstock.shared.values.distribution import VERSION, full_version

# A slow machine under load compiles for more than ten minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(4000)]

ROOT = Path(__file__).parents[3]
PARTS = ("kernels", "ops", "producer", "shared", "worker")
BUILD = "from setuptools import build_meta; build_meta.build_sdist('dist')"
IMPORT = "import penstock.producer as it; it.Client, it.SamplingParams; print(it.__file__)"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
# Modules that nothing imports are not compiled.
QUICKLY = {"PIP_NO_COMPILE": "1"}
HEAD = f"penstock_llm-{VERSION}.dist-info"
# The instruction set that every processor with compiled kernels has.
BASELINES = {"x86_64": "avx2", "aarch64": "neon"}
# Prints the library's path, and runs ``penstock`` with the words after it.
PRODUCT_AND_PROGRAM = """
import runpy
import torch
from penstock.kernels import native
from penstock.kernels.linear import linear, pack_weight
assert native.load() is None
inputs, weight = (torch.randn(rows, 130, generator=torch.Generator().manual_seed(rows)) for rows in (7, 65))
torch.testing.assert_close(linear(inputs, pack_weight(weight)), inputs @ weight.T, rtol=1e-5, atol=1e-4)
print(native.loaded().path, flush=True)
runpy.run_module("penstock.ops.cli", run_name="__main__")
"""


@dataclass(frozen=True)
class Dist:
    """A folder of the distribution's files, and the version that its programs print."""

    folder: Path
    full_version: str

    def wheel(self, name: str) -> Path:
        (path,) = self.folder.glob(f"{name}-*.whl")
        return path


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the wheel; ``empty`` is a folder without programs."""

    folder: Path
    site: Path
    empty: Path

    def run(self, program: str, *words: str | Path) -> str:
        # No compiler and no git is on such a PATH, and no other package on this one. If the last variable had a
        # value, kernels would be compiled.
        bare = {"PATH": str(self.empty), "PYTHONPATH": "", "PYTHONNOUSERSITE": "1", "CXX": ""}
        bare["PENSTOCK_NATIVE_MARCH"] = ""
        return run(self.folder / "bin" / program, *words, cwd=self.empty, **bare)


def run(*words: str | Path, cwd: Path, **variables: str) -> str:
    result = subprocess.run(
        words, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def copy_sources(target: Path) -> str:
    """Copy what builds need into a repository of its own, and return its commit."""
    for part in PARTS:
        shutil.copytree(ROOT / part, target / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    git = ("git", "-c", "user.name=tests", "-c", "user.email=tests@localhost", "-c", "commit.gpgsign=false")
    run(*git, "init", "--quiet", cwd=target)
    run(*git, "add", "--all", cwd=target)
    run(*git, "commit", "--quiet", "--message", "Copy", cwd=target)
    return run(*git, "rev-parse", "--short=12", "HEAD", cwd=target)


def requirements_of(name: str, *extras: str) -> set[str]:
    """Return the packages that a distribution with ``extras`` needs here, without itself."""
    names = set()
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            if requirement.name != name:
                names.add(requirement.name)
            names |= requirements_of(requirement.name, *requirement.extras)
    return names


def link_installed(name: str, site: Path) -> None:
    """Put an installed distribution into another folder of packages."""
    for top in {file.parts[0] for file in distribution(name).files or ()}:
        # Programs lie outside the folder of packages.
        if top not in ("..", "__pycache__") and not (site / top).exists():
            (site / top).symlink_to(str(distribution(name).locate_file(top)))


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Dist:
    if os.environ.get("PENSTOCK_DIST"):
        return Dist(ROOT / os.environ["PENSTOCK_DIST"], full_version())
    sources, empty = (tmp_path_factory.mktemp(name) for name in ("sources", "empty"))
    commit = copy_sources(sources)
    run(sys.executable, "-c", BUILD, cwd=sources)
    folder = sources / "dist"
    (sdist,) = folder.iterdir()
    run(*PIP, "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, sdist, cwd=empty)
    return Dist(folder, f"{VERSION} ({commit})")


@pytest.fixture(scope="module")
def kernels(dist: Dist) -> Path:
    """Return the wheel of the compiled kernels for this machine."""
    if not os.environ.get("PENSTOCK_DIST"):
        pytest.importorskip("ziglang")
        if platform.machine() not in BASELINES:
            pytest.skip(f"there are no compiled kernels for {platform.machine()}")
        command = ("-m", "penstock.ops.lab.kernels_wheel", "--only", BASELINES[platform.machine()])
        run(sys.executable, *command, "--out", dist.folder, cwd=ROOT)
    (wheel,) = dist.folder.glob(f"penstock_kernels-{VERSION}-py3-none-manylinux_2_28_{platform.machine()}.whl")
    return wheel


@pytest.fixture(scope="module")
def environment(dist: Dist, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder, empty = (tmp_path_factory.mktemp(name) for name in ("environment", "empty"))
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=empty)
    python = folder / "bin" / "python"
    run(*PIP, "--python", python, *wheels_command("Dockerfile", dist), cwd=empty, **QUICKLY)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=empty))
    for name in requirements_of("penstock-llm"):
        link_installed(name, site)
    return Environment(folder, site, empty)


def wheels_command(image: str, dist: Dist) -> list[str]:
    """Return the words after ``pip`` of the command that installs the wheels into an image."""
    match = re.search(r"pip (install .*--find-links /wheels .*?)(?: \\)?$", dockerfile(image), re.MULTILINE)
    assert match is not None
    return ["-q", *shlex.split(match[1].replace("/wheels", str(dist.folder)))]


def dockerfile(name: str) -> str:
    return (ROOT / "ops" / "deploy" / "docker" / name).read_text()


def test_files_and_metadata(dist: Dist) -> None:
    assert [path.name for path in dist.folder.glob("*.tar.gz")] == [f"penstock_llm-{VERSION}.tar.gz"]
    wheel = dist.wheel("penstock_llm")
    assert wheel.name == f"penstock_llm-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as opened:
        names, metadata = set(opened.namelist()), opened.read(f"{HEAD}/METADATA").decode()
    assert {f"penstock/{part}/py.typed" for part in PARTS} <= names
    vendored = [path.relative_to(ROOT) for part in PARTS for path in (ROOT / part).rglob("*.LICENSE")]
    # The laboratory is in no wheel.
    licences = [str(path) for path in vendored if path.parts[:2] != ("ops", "lab")]
    assert licences
    assert {f"{HEAD}/licenses/{licence}" for licence in ["LICENSE", *licences]} <= names
    assert not [name for name in names if name.startswith(("penstock/ops/lab", "tests"))]
    assert f"Requires-Dist: penstock-kernels=={VERSION};" in metadata
    # An index shows the description without the other files of this tree.
    targets = re.findall(r"\]\(([^)]+)\)", metadata)
    assert len(targets) > 5
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert not re.search(r"<(?:img|a)\b", metadata)


def test_the_wheel_runs_in_a_fresh_environment(dist: Dist, environment: Environment) -> None:
    for program in ("penstock", "worker"):
        assert environment.run(program, "--version") == f"{program} {dist.full_version}"
    assert environment.run("python", "-c", IMPORT) == str(environment.site / "penstock" / "producer" / "__init__.py")
    assert "--stream" in environment.run("penstock", "generate", "--help")


def test_compiled_kernels_compute_without_a_compiler(dist: Dist, kernels: Path, environment: Environment) -> None:
    with zipfile.ZipFile(kernels) as opened:
        licences = [name.rpartition("/")[2] for name in opened.namelist() if "/licenses/" in name]
    assert sorted(licences) == ["LICENSE", "libcxx.LICENSE"]
    python = environment.folder / "bin" / "python"
    run(*PIP, "--python", python, *wheels_command("Dockerfile.worker", dist), cwd=environment.empty, **QUICKLY)
    for name in requirements_of("penstock-llm", "worker"):
        link_installed(name, environment.site)
    text = environment.empty / "text"
    text.write_text("four plus two is six, and two plus four is six. " * 20)
    model = environment.site / "penstock" / "ops" / "demo" / "model"
    # int8 needs the compiled kernels.
    words = ("--quantization", "int8", "--reference", "float32", "--text", text, "--json")
    output = environment.run("python", "-c", PRODUCT_AND_PROGRAM, "quality", model, *words)
    library, _, said = output.partition("\n")
    assert Path(library).parent == environment.site / "penstock_kernels"
    formats = json.loads(said)["formats"]
    assert {each["weights"] for each in formats} == {"float32", "int8"}
    assert all(each["kl"] < 0.05 for each in formats)
