from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from penstock.ops.demo.run import MODEL
from penstock.ops.local_gateway import LocalGateway
from penstock.ops.local_stack import LocalStack
from penstock.producer import Client
from penstock.worker.text.tokenizer import TextCodec

Embeddings = Callable[[str], Any]


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A private Redis and `worker start` with the demo model, shared by the tests of one process."""
    options = ["--device", "cpu", "--served-model-name", "demo", "--max-num-seqs", "32", "--threads", "1"]
    options += ["--profile-dir", str(tmp_path_factory.mktemp("profiles"))]
    options.append("--enable-prompt-embeds")
    with LocalStack(MODEL, options) as stack:
        yield stack


@pytest.fixture(scope="session")
def files_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the gateway keeps the contents of files."""
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="session")
def gateway(
    deployment: LocalStack, files_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalGateway]:
    """One `penstock gateway` on the shared deployment, shared by the tests of one process; it wants no API keys."""
    log_path = tmp_path_factory.mktemp("gateway") / "gateway.log"
    options = ["--reconnect-grace", "1", "--max-body-bytes", "200000", "--reasoning-parser", "qwen3"]
    options += ["--files-dir", str(files_dir)]
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
