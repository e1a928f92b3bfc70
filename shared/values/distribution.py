"""The distribution's name and version, and the commands that install it.

Constants rather than installed metadata: they also hold in a clone that is not installed.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

NAME = "penstock-llm"
# The CPU kernels, compiled ahead; versions of both are equal.
KERNELS_NAME = "penstock-kernels"
VERSION = "0.2.0.dev0"  # pyproject.toml reads it
_FOLDER = Path(__file__).parent
# setup.py writes it into wheels and source distributions.
COMMIT_FILE = "commit.txt"


def install_command(*extras: str) -> str:
    """Return the shell command that installs the distribution with ``extras``."""
    return f"pip install '{NAME}[{','.join(extras)}]'" if extras else f"pip install {NAME}"


def kernels_command() -> str:
    """Return the shell command that installs the compiled kernels of this version."""
    return f"pip install {KERNELS_NAME}=={VERSION}"


def full_version() -> str:
    """Return the version, followed by the commit in parentheses if that is known."""
    commit = _read_commit()
    return f"{VERSION} ({commit})" if commit else VERSION


def _read_commit() -> str:
    try:
        return (_FOLDER / COMMIT_FILE).read_text().strip()
    except FileNotFoundError:
        pass
    clone = _FOLDER.parents[1]
    # A wheel may lie inside the clone of another project, whose commit is not ours.
    if not (clone / ".git").exists():
        return ""
    command = ["git", "-C", str(clone), "rev-parse", "--short=12", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""  # no usable git on this machine
    return result.stdout.strip() if result.returncode == 0 else ""
