"""An engine that dies over an image: the next one gets the same image."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.ops.lab.survey.images.models import write_vision_model
from penstock.ops.lab.survey.images.truth import picture
from penstock.producer import Client, SamplingParams
from penstock.shared.connection import CommandConnection
from penstock.shared.deployment.records import EngineHeartbeat
from penstock.shared.keys import Keys
from penstock.worker.models.images.processor import ImageProcessor

from ..gate import Gate
from ..processes import DEADLINE_S
from .conftest import Start
from .watching import Watched, busiest, finish, until

NUM_TOKENS = 12
# Without text: a random model writes bytes that are no characters.
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)


def shown(*seeds: int) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": picture(seed)} for seed in seeds]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


def last_pid_of(beat: EngineHeartbeat) -> int:
    """Return the process id of the engine core, or of its last rank."""
    assert beat.setup is not None
    return beat.core_pid if beat.setup.ranks is None else beat.setup.ranks.pids[-1]


async def images_left(url: str) -> list[bytes]:
    commands = CommandConnection(url)
    try:
        return await commands.execute("KEYS", Keys().model("demo").image("*").replace("{", r"\{"))
    finally:
        await commands.close()


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llava", ["--deterministic"]),
        ("llava", ["--deterministic", "--tensor-parallel-size", "2"]),
        ("qwen3_vl", ["--tensor-parallel-size", "2"]),
    ],
    ids=["one rank", "two ranks", "two ranks and positions in three axes"],
)
async def test_a_generation_over_images_resumes_at_another_engine(
    model: str, options: list[str], start: Start, gate: Gate, tmp_path: Path
) -> None:
    processor = await asyncio.to_thread(write_vision_model, model, tmp_path)
    num_image_tokens = sum(len(ImageProcessor(processor).process(picture(seed)).tokens.token_ids) for seed in (1, 2))
    stack = await start(2, *options, model=tmp_path)
    async with Client.connect(stack.url) as client:
        whole = (await client.generate(shown(1, 2), PARAMS)).outputs[0]
        others = [(await client.generate(shown(*seeds), PARAMS)).outputs[0] for seeds in ((1, 3), (2, 1))]
        assert len({tuple(answer.token_ids) for answer in (whole, *others)}) == 3
        assert await images_left(stack.url) == []
        gate.hold_at(5)
        watched = Watched(client.stream(shown(1, 2), PARAMS))
        await until(lambda: watched.num_tokens == 5, what="the stream does not start")
        assert len(await images_left(stack.url)) == 2
        os.kill(last_pid_of(await busiest(stack.url)), signal.SIGKILL)
        await finish([watched], [whole], gate)
        usage = watched.deltas[-1].usage
        assert usage is not None
        # The template's words are one token a character.
        assert usage.num_prompt_tokens == num_image_tokens + len("user: What is this? assistant: ")
        async with asyncio.timeout(DEADLINE_S):
            while await images_left(stack.url):
                await asyncio.sleep(0.05)
