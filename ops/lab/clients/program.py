"""A program to try against the gateway: its package, the tries, and the folders and environment of a try."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .answers import FILE, TEXT
from .deployment import EMBEDDER, MODEL, Deployment

TIMEOUT_S = 240.0
TASK = f"Create a file {FILE} with the word hi"
SCRIPTS = Path(__file__).parent / "scripts"
SHOWN_CHARS = 300

_ERROR = re.compile(r"[\w.]*(Error|Exception)\b")


class FailureError(Exception):
    """Failure of a try. The message says what the program did."""


class Try(NamedTuple):
    """Something that is tried with a program.

    Args:
        label: column of the table.
        run: raises ``FailureError`` if it does not work.
    """

    label: str
    run: Callable[[Trial], None]


class Program(NamedTuple):
    """A program.

    Args:
        name: name in the table and for ``--only``; lower case letters, digits and dashes.
        packages: from npm or PyPI; the first one's version is reported.
        registry: "npm" or "pip".
    """

    name: str
    packages: Sequence[str]
    registry: str
    tries: Sequence[Try]


class Installed:
    """An installed program in a folder of its own. Installing again does nothing."""

    def __init__(self, program: Program, folder: Path) -> None:
        self._program = program
        self.folder = folder / program.name
        self.python = self.folder / "bin" / "python"
        self.node_modules = self.folder / "node_modules"

    def install(self) -> None:
        """Install the packages.

        Raises:
            FailureError: the registry has no such package, or the installation failed.
        """
        mark, packages = self.folder / "installed", " ".join(self._program.packages)
        if mark.exists() and mark.read_text() == packages:
            return
        if self._program.registry == "npm":
            commands = [["npm", "install", "--no-fund", "--no-audit", "--prefix", self.folder, *self._program.packages]]
        else:
            commands = [
                [sys.executable, "-m", "venv", self.folder],
                [self.python, "-m", "pip", "install", "-q", *self._program.packages],
            ]
        for command in commands:
            result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
            if result.returncode:
                raise FailureError(f"not installed: {_last_line(result.stderr)}")
        mark.write_text(packages)

    @property
    def version(self) -> str:
        """Version of the first package."""
        package = self._program.packages[0]
        if self._program.registry == "npm":
            return json.loads((self.node_modules / package / "package.json").read_text())["version"]
        name = package.partition("[")[0]
        script = f"import importlib.metadata as m; print(m.version({name!r}))"
        return subprocess.run([self.python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


class Trial:
    """Run of a try, with an empty home and an empty work folder."""

    def __init__(self, installed: Installed, deployment: Deployment, folder: Path) -> None:
        self.installed = installed
        self.deployment = deployment
        self.home, self.work = folder / "home", folder / "work"
        for part in (self.home, self.work):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)

    @property
    def base_url(self) -> str:
        """Address of the gateway, with /v1."""
        return self.deployment.base_url

    @property
    def root_url(self) -> str:
        """Address of the gateway, without /v1."""
        return self.base_url.removesuffix("/v1")

    def run_command(self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> str:
        """Run a command in the work folder, with nothing of this environment but the path. Returns its output.

        Raises:
            FailureError: it failed, or was not done in time.
        """
        variables = {
            "HOME": str(self.home),
            "PATH": os.pathsep.join(
                ["/usr/local/bin", "/usr/bin", "/bin", str(Path(shutil.which("node") or "/").parent)]
            ),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "NO_PROXY": "127.0.0.1",
            "BASE_URL": self.base_url,
            "ROOT_URL": self.root_url,
            "MODEL": MODEL,
            "EMBEDDER": EMBEDDER,
            # LiteLLM would fetch a table of prices, and wait for it.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            **(environment or {}),
        }
        try:
            result = subprocess.run(
                [str(part) for part in command],
                cwd=self.work,
                env=variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise FailureError(f"not done after {TIMEOUT_S:g} s") from None
        if result.returncode:
            raise FailureError(f"exit {result.returncode}: {_last_line(result.stderr) or _last_line(result.stdout)}")
        return result.stdout

    def run_python(self, script: str, *arguments: str) -> str:
        """Run a script of ``scripts`` with the Python of the program."""
        return self.run_command([self.installed.python, SCRIPTS / script, *arguments])

    def run_node(self, script: str, *arguments: str) -> str:
        """Run a script of ``scripts`` with the modules of the program, which node looks for next to the script."""
        copy = self.installed.folder / script
        shutil.copyfile(SCRIPTS / script, copy)
        return self.run_command(["node", copy, *arguments])

    def check_file(self) -> None:
        """Check that the program has done the task.

        Raises:
            FailureError: the file is missing, or has another content.
        """
        path = self.work / FILE
        if not path.exists():
            raise FailureError(f"{FILE} was not created")
        if path.read_text().strip() != TEXT.strip():
            raise FailureError(f"{FILE} has the content {path.read_text()[:SHOWN_CHARS]!r}")


def does_task(run: Callable[[Trial], None]) -> tuple[Try, ...]:
    """Return the tries of an agent: the task, and the task with one engine killed in the middle of an answer.

    Args:
        run: gives ``TASK`` to the agent.
    """

    def undisturbed(trial: Trial) -> None:
        run(trial)
        trial.check_file()

    def disturbed(trial: Trial) -> None:
        with trial.deployment.killing_an_engine():
            run(trial)
        trial.check_file()

    return Try("task", undisturbed), Try("task, engine killed", disturbed)


def scripted(label: str, script: str, *arguments: str) -> Try:
    """Return a try that runs a script of ``scripts``: with node if it ends in .mjs, else with Python."""

    def run_script(trial: Trial) -> None:
        (trial.run_node if script.endswith(".mjs") else trial.run_python)(script, *arguments)

    return Try(label, run_script)


def _last_line(text: str) -> str:
    # Node prints an error's fields and its own version after the error.
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or [""])[-1][:SHOWN_CHARS]
