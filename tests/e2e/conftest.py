from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from penstock.ops.demo.run import MODEL
from penstock.ops.local.server import LocalGateway
from penstock.ops.local.stack import LocalStack
from penstock.producer import Client
from penstock.worker.text.tokenizer import TextCodec

from ..gate import Gate

Embeddings = Callable[[str], Any]


@pytest.fixture(scope="session")
def shared_gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    """The gate of all engines that are shared by tests; `gate` is for a test to use."""
    return Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture
def gate(shared_gate: Gate) -> Iterator[Gate]:
    """Holds requests where the test wants them; open again afterwards, whatever came of the test."""
    yield shared_gate
    shared_gate.open()


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory, shared_gate: Gate) -> Iterator[LocalStack]:
    """A private Redis and `worker start` with the demo model, shared by the tests of one process."""
    options = ["--device", "cpu", "--served-model-name", "demo", "--max-num-seqs", "32", "--threads", "1"]
    options += ["--profile-dir", str(tmp_path_factory.mktemp("profiles"))]
    options.append("--enable-prompt-embeds")
    with ExitStack() as stack:
        with shared_gate.for_engines():
            deployment = stack.enter_context(LocalStack(MODEL, options))
        yield deployment


@pytest.fixture(scope="session")
def files_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which the gateway keeps the contents of files."""
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="session")
def gateway(
    deployment: LocalStack, files_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalGateway]:
    """`penstock gateway` on the shared deployment, shared by the tests of one process; it needs no API keys."""
    log_path = tmp_path_factory.mktemp("gateway") / "gateway.log"
    # Who is cut off has to come back in time, on a busy machine too; who never does is waited for by the test.
    options = ["--reconnect-grace", "5", "--max-body-bytes", "200000", "--reasoning-parser", "qwen3"]
    # However slow the machine is, a refusal comes from the status.
    options += ["--files-dir", str(files_dir), "--status-wait", "60"]
    with LocalGateway(deployment.url, options, log_path) as gateway:
        yield gateway


@pytest.fixture
async def client(deployment: LocalStack) -> AsyncIterator[Client]:
    async with Client.connect(deployment.url) as client:
        yield client


@pytest.fixture(scope="session")
def embeddings() -> Embeddings:
    """The demo model's own embeddings of a text: a numpy array ``[tokens, hidden size]``."""
    with safe_open(Path(MODEL) / "model.safetensors", "np") as weights:
        (name,) = [name for name in weights.keys() if "embed_tokens" in name]  # noqa: SIM118  # it is no dict
        table = weights.get_tensor(name)
    codec = TextCodec.load(MODEL)
    return lambda text: table[codec.encode(text)]
