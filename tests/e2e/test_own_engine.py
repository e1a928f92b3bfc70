"""``LLM(model=…)``: an engine of one program, from its start to every way in which it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tqdm import tqdm

from penstock.ops.demo.run import MODEL
from penstock.producer import LLM, SamplingParams
from penstock.shared.errors import ConfigurationError, EngineDeadError, UnknownArgumentError, ValidationError

from ..gate import Gate
from ..processes import DEADLINE_S, is_gone
from .following import LONG, PROMPT

pytestmark = pytest.mark.xdist_group("own-engine")

GREEDY = SamplingParams(temperature=0.0, max_tokens=32)
OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "max_num_seqs": 8, "served_model_name": "demo"}
EMBEDDER = Path(MODEL).with_name("embedder")
# A cell of a notebook runs inside an event loop, and must see no warning of it.
NOTEBOOK = """
import asyncio, sys, warnings
from penstock.producer import LLM

async def cell():
    llm = LLM(model={!r}, device="cpu", threads=1)
    one, other = llm.embed(["a", "b"], use_tqdm=False)
    print(len(one.outputs.embedding), flush=True)
    input()

sys.modules["ipykernel"] = sys
warnings.simplefilter("error", RuntimeWarning)
asyncio.run(cell())
"""


@pytest.fixture(scope="module")
def llm(shared_gate: Gate) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch, shared_gate.for_engines():
        # Of another deployment: this engine has nothing to do with it.
        patch.setenv("PENSTOCK_SHARDS", "a=redis://127.0.0.1:1")
        patch.setenv("PENSTOCK_NAMESPACE", "other")
        with LLM(model=MODEL, **OPTIONS) as llm:
            yield llm


def own_processes() -> list[psutil.Process]:
    """Return the processes of the engines that this process, or a program that it started, has for itself."""
    starters = [one for one in psutil.Process().children(recursive=True) if "penstock.ops.local" in words(one)]
    children = [child for one in starters for child in one.children(recursive=True)]
    folders = {match[1] for one in children if (match := re.search(r"unix://(\S+)/redis\.sock", " ".join(words(one))))}
    servers = [one for one in psutil.process_iter() if any(folder in " ".join(words(one)) for folder in folders)]
    return [*{*starters, *children, *servers}]


def words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def await_end(processes: list[psutil.Process]) -> None:
    give_up_at = time.monotonic() + DEADLINE_S
    while left := [process for process in processes if not is_gone(process)]:
        assert time.monotonic() < give_up_at, left
        time.sleep(0.05)


class Bar(tqdm):
    last: str = ""

    def close(self) -> None:
        type(self).last = str(self)
        super().close()


def test_a_list_of_prompts_and_a_chat_with_tqdm(llm: LLM) -> None:
    outputs = llm.generate(["four plus two is", "spell 407:"], GREEDY, use_tqdm=Bar)
    assert [output.text for output in outputs] == [" six.", " four hundred seven."]
    assert re.search(r"Processed prompts: 100%.* 2/2 .*est\. speed input: \d+\.\d\d toks/s, output: \d+", Bar.last)
    assert llm.chat([{"role": "user", "content": "spell 7:"}], GREEDY)[0].text == " seven."
    (engine,) = llm.engines()
    assert engine.setup is not None
    assert engine.setup.max_num_seqs == 8


def test_a_forked_child_leaves_the_engine_to_the_program(llm: LLM) -> None:
    if (child := os.fork()) == 0:
        llm.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert llm.generate("spell 7:", GREEDY)[0].text == " seven."


def test_an_engine_that_ends_for_good_ends_the_running_call(llm: LLM, gate: Gate) -> None:
    gate.hold_at(5)
    deltas = llm.stream(PROMPT, LONG)
    next(deltas)
    processes = own_processes()
    (supervisor,) = [one for one in processes if "penstock.worker.cli" in words(one)]
    supervisor.kill()
    with pytest.raises(EngineDeadError, match="the worker ended"):
        list(deltas)
    with pytest.raises(EngineDeadError, match="the worker ended"):
        llm.generate("spell 7:", GREEDY)
    await_end(processes)


@pytest.mark.parametrize("phase", ["loading", "serving"])
def test_nothing_is_left_of_a_notebook_that_is_killed(phase: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NOTEBOOK.format(str(EMBEDDER)))
    program = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    processes: list[psutil.Process] = []
    try:
        assert program.stdout is not None
        if phase == "serving":
            assert int(program.stdout.readline()) == 96
        give_up_at = time.monotonic() + DEADLINE_S
        while not any("penstock.worker.cli" in words(one) for one in processes):
            assert time.monotonic() < give_up_at, "no worker starts"
            processes = own_processes()
            time.sleep(0.05)
        os.kill(program.pid, signal.SIGKILL)
        program.wait()
        await_end(processes)
    finally:
        program.kill()
        program.communicate()


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            {"model": MODEL, "max_num_sqs": 8},
            ConfigurationError,
            r"unknown option --max-num-sqs; did you mean --max-nu",
        ),
        ({"model": MODEL, "max_num_seqs": 0}, ConfigurationError, "did not start: --max-num-seqs must be .* got 0"),
        ({"model": "./no-such-folder"}, ConfigurationError, "did not start: .*no-such-folder"),
        ({"model": MODEL, "shards": "a=redis://h"}, ValidationError, "shards belongs to a deployment; give its url"),
        ({"url": MODEL}, ConfigurationError, r"is not a Redis URL; LLM\(model=.*\) starts an engine for this program"),
        (
            {"url": "redis://h", "dtype": "float32"},
            UnknownArgumentError,
            r"or to LLM\(model=\.\.\.\) where neither url",
        ),
    ],
)
def test_a_start_that_fails_says_why(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        LLM(**arguments)
    assert not own_processes()


def test_a_deployment_that_the_environment_names_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REDIS_URL", "redis://127.0.0.1:1")
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1:1"):
        LLM(model=MODEL, retry_for_s=0.1)
