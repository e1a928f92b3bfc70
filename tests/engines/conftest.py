"""Engines of others, where they are installed: vLLM in the environment of ``make engine-vllm``, or a named one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from penstock.ops.demo.run import MODEL
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client

from ..gate import Gate

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
OPTIONS = ["--device", "cpu", "--dtype", "float32", "--threads", "1", "--max-num-seqs", "8", "--enforce-eager"]
OPTIONS += ["--kv-cache-memory", "64MiB", "--max-model-len", "1024", "--served-model-name", "demo"]
OPTIONS += ["--max-deliveries", "2"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A start of vLLM takes a while, also on a machine with nothing else to do."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(900))
            item.add_marker(pytest.mark.xdist_group("vllm"))


@pytest.fixture(scope="session", params=["vllm", "vllm-0.33"])
def vllm_python(request: pytest.FixtureRequest) -> str:
    """The interpreter that has a version of vLLM; a test that wants it is skipped where there is none."""
    named = os.environ.get("PENSTOCK_VLLM_PYTHON", "")
    python = (named if request.param == "vllm" else "") if named else _installed_python(request.param)
    if not python:
        pytest.skip(f"no {request.param} here: run make engine-{request.param}, or set PENSTOCK_VLLM_PYTHON")
    return python


def _installed_python(name: str) -> str:
    """Return the Python of ``make engine-vllm``; ``make bench-peers`` installs a vLLM without the needs of our core."""
    python = ROOT / ".bench-peers" / name / "bin" / "python"
    if not python.exists():
        return ""
    result = subprocess.run([python, "-c", "import structlog"], capture_output=True, check=False)
    return str(python) if result.returncode == 0 else ""


@pytest.fixture(scope="session")
def penstock_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for PYTHONPATH, by which another interpreter finds this Penstock and nothing else of ours."""
    folder = tmp_path_factory.mktemp("path")
    (folder / "penstock").symlink_to(ROOT)
    return str(folder)


@pytest.fixture(scope="session")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="session")
def start_vllm(
    vllm_python: str, penstock_path: str, gate: Gate, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., AbstractContextManager[LocalStack]]:
    """A function that starts a private Redis and `worker start --engine vllm`, whose cores heed ``gate``."""

    @contextmanager
    def start(model: Path, *options: str) -> Iterator[LocalStack]:
        # Stands for vLLM's interpreter: a core that it starts is gated, and all else is vLLM's own.
        python = tmp_path_factory.mktemp("vllm") / "python"
        python.write_text(f'#!/bin/sh\nexec {vllm_python} {HERE / "gated_program.py"} "$@"\n')
        python.chmod(0o755)
        with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
            patch.setenv("PYTHONPATH", penstock_path)
            with gate.for_engines():
                of_engine = ["--engine", "vllm", "--engine-python", str(python)]
                deployment = stack.enter_context(LocalStack(model, [*of_engine, *options]))
            yield deployment

    return start


@pytest.fixture(scope="session")
def vllm_stack(
    start_vllm: Callable[..., AbstractContextManager[LocalStack]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalStack]:
    """An engine with the demo model."""
    with start_vllm(MODEL, *OPTIONS, "--profile-dir", str(tmp_path_factory.mktemp("profiles"))) as stack:
        yield stack


@pytest.fixture
async def client(vllm_stack: LocalStack) -> AsyncIterator[Client]:
    async with Client.connect(vllm_stack.url) as client:
        yield client
