"""Packages, long description and commit of the distribution; everything else is in pyproject.toml."""

import re
import runpy
import subprocess
import tomllib
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

# Folders at the top become the packages below ``penstock``. The laboratory is for clones alone.
PARTS = ("kernels", "ops", "producer", "shared", "worker")
ROOT = Path(__file__).resolve().parent
# ``shared/values/distribution.py`` reads it.
COMMIT_FILE = Path("shared", "values", "commit.txt")
# Targets of Markdown links that are paths of this tree.
RELATIVE_TARGET = re.compile(r"(?<=\]\()(?![a-z]+:|[#/])([^()\s]+)(?=\))")


def long_description() -> str:
    """Return README.md with absolute links, since an index has no other file of this tree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = runpy.run_path(str(ROOT / "shared" / "values" / "distribution.py"))["VERSION"]
    revision = "main" if "dev" in version else f"v{version}"

    def absolute(match: re.Match[str]) -> str:
        kind = "raw" if match[1].endswith((".png", ".svg")) else "blob"
        return f"{project['urls']['Repository']}/{kind}/{revision}/{match[1]}"

    return RELATIVE_TARGET.sub(absolute, (ROOT / "README.md").read_text())


def write_commit(folder: Path) -> None:
    """Write the commit of this tree below ``folder``, if it is known: from git, or from the source distribution."""
    commit = ""
    if (ROOT / COMMIT_FILE).exists():
        commit = (ROOT / COMMIT_FILE).read_text()
    elif (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if commit:
        (folder / COMMIT_FILE).write_text(commit)


class BuildWithCommit(build_py):
    """The step that collects the modules, with the commit beside them."""

    def run(self) -> None:
        super().run()
        # An editable installation asks git when it is asked.
        if not self.editable_mode:
            write_commit(Path(self.build_lib, "penstock"))


class SdistWithCommit(sdist):
    """The source distribution, with the commit of the clone that made it."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir))


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    packages=[
        f"penstock.{name}"
        for part in PARTS
        for name in find_packages(include=[part, f"{part}.*"], exclude=["ops.lab", "ops.lab.*"])
    ],
    cmdclass={"build_py": BuildWithCommit, "sdist": SdistWithCommit},
)
