"""Long work of one kind holds up neither other kinds nor other work in the event loop's threads."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from penstock.producer.background.concurrency import LongWork, in_long_thread
from penstock.producer.io_processors import IOProcessor, NamedProcessor

from ...processes import DEADLINE_S

# More than there are threads of any kind.
MANY = 80


class SlowProcessor(IOProcessor):
    """Processor that waits until the test releases it."""

    name = "slow"

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def parse_request(self, data: Any) -> Any:
        self.go_on.wait(DEADLINE_S)
        return data

    def pre_process(self, prompt: Any, request_id: str | None = None) -> Any:
        return prompt

    def post_process(self, model_output: Any, request_id: str | None = None) -> Any:
        return model_output


async def test_slow_processors_leave_the_loops_own_threads_alone() -> None:
    processor = SlowProcessor()
    named = NamedProcessor(processor)
    calls = [asyncio.create_task(named.prompts("text", str(number))) for number in range(MANY)]
    await asyncio.sleep(0)  # each has asked for a thread
    try:
        async with asyncio.timeout(DEADLINE_S):
            assert await asyncio.to_thread(len, "abc") == 3
            assert await in_long_thread(LongWork.ADAPTERS, len, "abc") == 3
    finally:
        processor.go_on.set()
    assert await asyncio.gather(*calls) == [["text"]] * MANY
