from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from penstock.ops.demo.run import MODEL
from penstock.ops.local_stack import LocalStack
from penstock.producer import Client


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """A private Redis and `worker start` with the demo model, shared by the tests of one process."""
    options = ["--device", "cpu", "--served-model-name", "demo", "--max-num-seqs", "32", "--threads", "1"]
    options += ["--profile-dir", str(tmp_path_factory.mktemp("profiles"))]
    with LocalStack(MODEL, options) as stack:
        yield stack


@pytest.fixture
async def client(deployment: LocalStack) -> AsyncIterator[Client]:
    async with Client.connect(deployment.url) as client:
        yield client
