"""The wheel, built from the source distribution, in a fresh environment: without a compiler, away from the clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from penstock.shared.values.distribution import VERSION

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PARTS = ("kernels", "ops", "producer", "shared", "worker")
BUILD = "from setuptools import build_meta; build_meta.build_sdist('dist')"
IMPORT = "import penstock.producer as it; it.Client, it.SamplingParams; print(it.__file__)"


def run(*words: str | Path, cwd: Path, **variables: str) -> str:
    result = subprocess.run(
        words, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300, check=False
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


def requirements_of(name: str) -> set[str]:
    """Return the packages that a distribution needs here, without those of its extras, itself included."""
    names = {name}
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            names |= requirements_of(requirement.name)
    return names


def copy_installed(name: str, folder: Path) -> None:
    for file in distribution(name).files or ():
        # Programs lie outside the folder of packages.
        if ".." not in file.parts and "__pycache__" not in file.parts:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(file.locate()), folder / file)


def test_the_wheel_runs_in_a_fresh_environment(tmp_path: Path) -> None:
    sources, built, empty = (tmp_path / name for name in ("sources", "built", "empty"))
    for folder in (sources, empty):
        folder.mkdir()
    commit = copy_sources(sources)
    run(sys.executable, "-c", BUILD, cwd=sources)
    (sdist,) = (sources / "dist").iterdir()
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", built, sdist, cwd=empty)
    (wheel,) = built.iterdir()
    assert (sdist.name, wheel.name) == (f"penstock_llm-{VERSION}.tar.gz", f"penstock_llm-{VERSION}-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as opened:
        names, head = set(opened.namelist()), f"penstock_llm-{VERSION}.dist-info"
        metadata = opened.read(f"{head}/METADATA").decode()
    assert {f"penstock/{part}/py.typed" for part in PARTS} <= names
    licences = {"LICENSE", "ops/dashboard/static/vendor/htmx.LICENSE"}
    assert {f"{head}/licenses/{licence}" for licence in licences} <= names
    assert not [name for name in names if name.startswith(("penstock/ops/lab", "tests"))]

    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=empty)
    python = environment / "bin" / "python"
    run(*pip, "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=empty)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=empty))
    needed = {Requirement(line.split(": ")[1]) for line in metadata.splitlines() if line.startswith("Requires-Dist")}
    for name in {name for each in needed if not each.marker for name in requirements_of(each.name)}:
        copy_installed(name, site)

    # No compiler and no git is on such a PATH, and no other package on this one.
    bare = {"PATH": str(empty), "PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}
    for program in ("penstock", "worker"):
        line = run(environment / "bin" / program, "--version", cwd=empty, **bare)
        assert line == f"{program} {VERSION} ({commit})"
    assert run(python, "-c", IMPORT, cwd=empty, **bare) == str(site / "penstock" / "producer" / "__init__.py")
    assert "--stream" in run(environment / "bin" / "penstock", "generate", "--help", cwd=empty, **bare)
