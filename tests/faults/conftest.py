from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.ops.demo.run import MODEL
from penstock.ops.lab.clusters.sentinel_trio import SentinelTrio, has_sentinel_mode
from penstock.ops.local.stack import LocalStack

from ..gate import Gate
from .faulty_model import make_faulty_model

OPTIONS = ["--device", "cpu", "--served-model-name", "demo", "--threads", "1", "--max-num-seqs", "16"]

Start = Callable[..., Awaitable[LocalStack]]

# Of the test that runs.
_STACKS = pytest.StashKey[list[LocalStack]]()
_NUM_LINES_TOLD = 80
# A step that fails tells all of its requests.
_MAX_CHARS_OF_LINE = 1000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add the workers' logs to the report of a rare failure: their folder is removed with them."""
    report: Any = yield
    if call.when == "call" and report.failed:
        for stack in item.stash.get(_STACKS, []):
            # All write one file. A start that failed has removed it, and its error contains it.
            for worker in stack.workers[:1] if stack.log_path.exists() else []:
                # Every few seconds, as long as a test waits: they would fill the report.
                lines = [line for line in worker.log.splitlines() if '"engine_stats"' not in line][-_NUM_LINES_TOLD:]
                text = "\n".join(line[:_MAX_CHARS_OF_LINE] for line in lines)
                report.sections.append(("the last lines of its workers", text))
    return report


@pytest.fixture
def start(gate: Gate, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts a Redis and workers of the test's own: ``start(num_workers, *options)``; they heed the test's gate."""
    stacks = request.node.stash[_STACKS] = []
    with ExitStack() as stack:

        async def start(num_workers: int, *options: str, model: Path = MODEL, redis_url: str = "") -> LocalStack:
            def enter() -> LocalStack:
                stacks.append(LocalStack(model, [*OPTIONS, *options], num_workers=num_workers, redis_url=redis_url))
                return stack.enter_context(stacks[-1])

            return await asyncio.to_thread(enter)

        yield start


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[SentinelTrio]:
    """A primary, replicas and Sentinels that ask for passwords. To be named before ``start``, so that it ends last."""
    if not has_sentinel_mode(tmp_path):
        pytest.skip("the redis-server here cannot be a Sentinel")
    with SentinelTrio(tmp_path / "redis", password="s3cret") as trio:
        yield trio


@pytest.fixture
def start_faulty(start: Start, tmp_path: Path) -> Start:
    """Factory like ``start``, with the model whose prompts set off faults; takes keywords of ``make_faulty_model``."""

    async def start_faulty(num_workers: int, *options: str, **faults: float) -> LocalStack:
        model = await asyncio.to_thread(make_faulty_model, tmp_path / "faulty", **faults)
        return await start(num_workers, "--trust-remote-code", *options, model=model)

    return start_faulty
