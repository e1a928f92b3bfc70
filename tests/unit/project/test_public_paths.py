"""Public import paths and programs for ``python -m``: files may move, these names may not."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# With names that people take from there.
PUBLIC = {
    "penstock.producer": ("Client", "LLM", "SamplingParams"),
    "penstock.producer.batches": ("BatchStore", "run_batch"),
    "penstock.producer.jobs": ("JobSet", "JobSettings"),
    "penstock.producer.openai.endpoints": ("prepare",),
    "penstock.producer.reconnect": ("StreamPosition",),
    "penstock.producer.sse": ("EventStream", "encode_event"),
    "penstock.producer.webhooks.secrets": (),
    "penstock.shared.errors": ("PenstockError",),
    "penstock.worker.engine.rpc": ("RpcEngine", "rpc_method"),
}
PROGRAMS = (
    "penstock.ops.cli",
    "penstock.ops.lab.bench.install_peers",
    "penstock.ops.lab.demo_model.train",
    "penstock.ops.lab.gpu_check",
    "penstock.ops.lab.kernels",
    "penstock.ops.lab.random_model",
    "penstock.ops.lab.survey",
    "penstock.worker",
    "penstock.worker.cli",
    "penstock.worker.engine",
    "penstock.worker.engine.fork_server",
    "penstock.worker.engine.offline",
    "penstock.worker.serving",
)


@pytest.mark.parametrize("module", PUBLIC)
def test_public_imports_exist(module: str) -> None:
    if module == "penstock.producer.jobs":
        pytest.importorskip("arq")
    imported = importlib.import_module(module)
    assert [name for name in PUBLIC[module] if not hasattr(imported, name)] == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_public_programs_exist(name: str) -> None:
    """Their files exist: some need torch to be imported."""
    path = ROOT.joinpath(*name.split(".")[1:])
    program = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    assert "__main__" in program.name + program.read_text()
