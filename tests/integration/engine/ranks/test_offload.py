"""KV blocks of several ranks outlive a killed engine: the next one reads them, and its tokens are those of one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.control.engine import Sleep, SleepState, WakeUp
from penstock.shared.control.model import ReloadWeights
from penstock.shared.messages.core import EngineCoreOutputs, Ready
from penstock.shared.stats import KVOffloadStats

from ..harness import CoreProcess, request
from .test_ranks import ask, start, with_other_weights

Cores = Callable[..., CoreProcess]
# 40 tokens each, of which two blocks of 16 can be read again.
PROMPTS = [[number, *range(6, 45)] for number in (50, 60, 70)]
NUM_BLOCK_TOKENS, NUM_PROMPT_BLOCKS = 16, 2
# Of 40 tokens of the prompt and 30 of the answer, of which the last is not computed.
NUM_FULL_BLOCKS = 4
DEADLINE_S = 120.0
LAYOUTS = [
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
]
SAMPLED = {"temperature": 1.0, "seed": 7}  # so that a wrong bit shows sooner


@pytest.fixture
def cores(demo_model: Path) -> Iterator[Cores]:
    with ExitStack() as stack:

        def make(**options: Any) -> CoreProcess:
            core = CoreProcess()
            stack.callback(core.close)
            stack.callback(core.process.kill)
            ready = start(core, demo_model, **options)
            assert isinstance(ready, Ready), ready
            return core

        yield make


class Answers:
    """Answers of a core, and its latest statistics."""

    def __init__(self, core: CoreProcess, **params: Any) -> None:
        self.tokens = {str(number): list[int]() for number in range(len(PROMPTS))}
        self.num_cached_tokens: dict[str, int] = {}
        self.stats = KVOffloadStats()
        for name, prompt in zip(self.tokens, PROMPTS, strict=True):
            core.send(request(name, prompt, **{**SAMPLED, **params}))
        num_unfinished = len(PROMPTS)
        while num_unfinished:
            message = core.receive()
            assert isinstance(message, EngineCoreOutputs)
            if message.scheduler_stats is not None and message.scheduler_stats.kv_offload is not None:
                self.stats = message.scheduler_stats.kv_offload
            for output in message.outputs:
                assert output.error is None, output.error
                self.tokens[output.request_id] += output.new_token_ids
                self.num_cached_tokens.setdefault(output.request_id, output.num_cached_tokens)
                num_unfinished -= output.finish_reason is not None

    @property
    def num_cached_blocks(self) -> list[int]:
        return [count // NUM_BLOCK_TOKENS for count in self.num_cached_tokens.values()]


def await_files(folder: Path, count: int) -> None:
    give_up_at = time.monotonic() + DEADLINE_S
    while len(list(folder.glob("blocks/*/*/*.kv"))) < count:
        assert time.monotonic() < give_up_at, "blocks are not written"
        time.sleep(0.01)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_blocks_come_back_after_a_kill(cores: Cores, layout: dict[str, int], tmp_path: Path) -> None:
    expected = Answers(cores()).tokens
    options: dict[str, Any] = {"kv_offload_dir": str(tmp_path), **layout}
    first = cores(**options)
    answers = Answers(first)
    assert answers.tokens == expected
    assert answers.num_cached_blocks == [0, 0, 0]
    await_files(tmp_path, NUM_FULL_BLOCKS * len(PROMPTS))
    first.process.kill()

    following = Answers(cores(**options))
    assert following.tokens == expected
    assert following.num_cached_blocks == [NUM_PROMPT_BLOCKS] * len(PROMPTS)
    assert following.stats.num_corrupt_blocks == 0


def test_engines_with_other_ranks_read_no_blocks(cores: Cores, tmp_path: Path) -> None:
    """Ranks add in another order than one rank, so bits differ."""
    first = cores(kv_offload_dir=str(tmp_path), tensor_parallel_size=2)
    Answers(first)
    await_files(tmp_path, NUM_FULL_BLOCKS * len(PROMPTS))
    first.process.kill()
    for layout in ({}, {"pipeline_parallel_size": 2}):
        assert Answers(cores(kv_offload_dir=str(tmp_path), **layout)).num_cached_blocks == [0, 0, 0]


def test_weights_of_the_last_stage_belong_to_the_identity(cores: Cores, demo_model: Path, tmp_path: Path) -> None:
    """They do not affect the first stage's part, which must not be read either, because the last one's is wrong."""
    kept, others = tmp_path / "kept", with_other_weights(demo_model, tmp_path / "others")
    core = cores(kv_offload_dir=str(kept), pipeline_parallel_size=2)
    before = Answers(core)
    ask(core, ReloadWeights(path=str(others)))
    changed = Answers(core)
    assert changed.num_cached_blocks == [0, 0, 0]
    assert changed.tokens != before.tokens
    ask(core, ReloadWeights(path=str(demo_model)))
    assert Answers(core).tokens == before.tokens


def test_host_memory_keeps_the_blocks_of_sleeping_ranks(cores: Cores) -> None:
    core = cores(kv_offload_memory=1 << 22, tensor_parallel_size=2)
    before = Answers(core)
    ask(core, Sleep(level=1))
    assert ask(core, WakeUp()) == SleepState()
    after = Answers(core)
    assert after.tokens == before.tokens
    assert after.num_cached_blocks == [NUM_PROMPT_BLOCKS] * len(PROMPTS)
