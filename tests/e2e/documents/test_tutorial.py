"""The commands of README and tutorial, in one shell and an empty home folder, as a reader pastes them.

The model has the name that the pages use. Its file is the real one where this machine has it, else the demo model's.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.ops.lab.bench.engines.quality import SMOLLM2
from penstock.shared.deployment.pretrained import PRETRAINED

from ...engines.demo_gguf import write_demo
from ...gate import Gate
from ...native_library import use_cache

pytestmark = pytest.mark.xdist_group("deployment")

ROOT = Path(__file__).parents[3]
TUTORIAL = ROOT / "ops" / "guide" / "start" / "tutorial.md"
BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
# The installation, which test_wheel.py does without a network.
INSTALL = ("python3 -m venv", "pip install")
# The pages name ports, so the shell has a network of its own where the system permits it.
NETWORK = ["unshare", "--net", *(["--map-root-user"] if os.getuid() else []), "sh", "-c", "ip link set lo up && bash"]


def blocks_of(page: Path) -> list[str]:
    """Return the commands of each block without those that install."""
    blocks = [
        "".join(line for line in block.splitlines(keepends=True) if not line.startswith(INSTALL))
        for block in BLOCK.findall(page.read_text())
    ]
    return [block for block in blocks if block]


class Shell:
    """A shell that a reader types into; leaving it ends what it left running."""

    def __init__(self, home: Path) -> None:
        removed = ("PENSTOCK_REDIS_URL", "PENSTOCK_DATA_DIR", "XDG_CACHE_HOME", "XDG_DATA_HOME")
        environment = {name: value for name, value in os.environ.items() if name not in removed}
        environment |= {"HOME": str(home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        refused = subprocess.run([*NETWORK[:-1], "ip link set lo up"], capture_output=True, check=False).returncode
        self._process = subprocess.Popen(
            ["bash"] if refused else NETWORK,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=home,
            start_new_session=True,
        )
        self.run("set -e -o pipefail\n")

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.communicate()

    def run(self, commands: str) -> str:
        """Run commands and return what they print. A command that fails ends the shell."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{commands}echo __end__\n")
        self._process.stdin.flush()
        lines: list[str] = []
        for line in self._process.stdout:
            if line.endswith("__end__\n"):
                return "".join([*lines, line.removesuffix("__end__\n")])
            lines.append(line)
        raise AssertionError(f"a command fails:\n{commands}\n{''.join(lines)}")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with nothing but the model, which the first start downloads, and the kernels of this machine."""
    real = SMOLLM2.find()
    use_cache(tmp_path / ".cache", monkeypatch)
    model = PRETRAINED["smollm2"].path
    model.parent.mkdir(parents=True)
    if real is not None:
        model.symlink_to(real)
    else:
        write_demo(model)
    return tmp_path


def test_the_tutorial_works_as_it_is_written(home: Path, gate: Gate) -> None:
    """The answer cannot end before the worker is killed: the gate holds it after its first token."""
    printed: list[str] = []
    with gate.for_engines(), Shell(home) as shell:
        for block in blocks_of(TUTORIAL):
            if "kill -9" in block:
                gate.hold_at(1)
            printed.append(shell.run(block))
            gate.open()
    output = "".join(printed)
    assert output.count("ready: model smollm2 on 1 engine, cpu") == 1
    assert "<title>" in output
    answer = (home / "first" / "answer.txt").read_text()
    events = [json.loads(line) for line in re.findall(r"(?m)^data: (.*)$", answer)]
    tokens = [event["index"] + number for event in events for number in range(event["num_tokens"])]
    assert tokens == list(range(len(tokens)))
    assert len(tokens) > 1
    assert [event["finish_reason"] for event in events if "finish_reason" in event] in (["stop"], ["length"])


def test_the_commands_of_the_readme_are_those_of_the_tutorial() -> None:
    ours, tutorial = (
        {line for block in BLOCK.findall(page.read_text()) for line in block.splitlines()}
        for page in (ROOT / "README.md", TUTORIAL)
    )
    assert {line.partition("  #")[0] for line in ours} - {line.partition("  #")[0] for line in tutorial} == {
        "kill $(cat app.pid two.pid)"
    }
