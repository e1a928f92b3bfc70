from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from anthropic import AsyncAnthropic

from penstock.ops.local.server import LocalGateway
from penstock.ops.local.stack import LocalStack
from penstock.producer.batches import BatchStore

from ...processes import DEADLINE_S


@pytest.fixture
async def claude(gateway: LocalGateway) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=gateway.root_url, api_key="any", max_retries=0, timeout=DEADLINE_S) as claude:
        yield claude


@pytest.fixture
async def store(deployment: LocalStack, files_dir: Path) -> AsyncIterator[BatchStore]:
    async with BatchStore(deployment.url, files_dir) as store:
        yield store
