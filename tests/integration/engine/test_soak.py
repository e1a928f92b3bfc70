"""Everything at once, often enough, in an engine core that has too little cache for it."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from penstock.ops.demo.task import TASKS, held_out_questions
from penstock.producer.inputs.prompt import encode_embeds
from penstock.shared.control.calls import Utility
from penstock.shared.control.engine import (
    CheckInvariants,
    CollectiveRpc,
    Invariants,
    ResetPrefixCache,
    RpcResult,
    Sleep,
    SleepState,
    WakeUp,
)
from penstock.shared.messages.core import (
    AbortRequests,
    EngineCoreOutputs,
    Ready,
    SchedulerStats,
    UtilityCall,
    UtilityOutput,
)
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.config.engine_config import EngineConfig

from ...conftest import DEMO_MODEL
from .harness import CoreProcess
from .soak import MAX_MODEL_LEN, Case, Whole, free_case, known_case, structured_case

# The soak ends when each of these has happened so often: not sooner on a fast machine, nor poorer on a slow one.
# For longer, multiply by hand: every further 1,000 requests take some 15 s of a core.
ENOUGH = {
    "rounds": 30,
    "known": 60,
    "known by embeddings": 20,
    "structured": 40,
    "free": 120,
    "aborted": 40,
    "prefix caches reset": 10,
    "sleeps of level 1": 2,
    "sleeps of level 2": 2,
    "preemptions": 20,
    "prefix cache hits": 500,
}
# Growth of medians from the second third of the rounds to the last, since the first fills caches.
MAX_BYTES_GROWTH = 512 << 10
MAX_BLOCKS_GROWTH = 1_500
# A module that the core imports. The resident size depends on when the allocator returns freed pages to the system, so
# it says little of leaks. These count live memory: malloc's, where torch and other libraries have theirs, and Python's.
MEMORY_METHODS = """
import ctypes
import gc
import sys
from pathlib import Path

from penstock.worker.engine.rpc import rpc_method

FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo2


@rpc_method("live_memory")
def live_memory(engine):
    gc.collect()
    info = mallinfo2()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    sizes = [int(status[name].split()[0]) << 10 for name in ("RssAnon", "RssFile")]
    return [info.uordblks + info.hblkhd, sys.getallocatedblocks(), *sizes]
"""
CONFIG = EngineConfig(
    model=str(DEMO_MODEL),
    num_threads=1,
    max_model_len=MAX_MODEL_LEN,
    max_num_seqs=16,
    max_num_batched_tokens=48,
    # 24 blocks of 16 tokens of 2 KiB: 16 requests would want up to 128.
    kv_cache_memory=24 * 16 * 2048,
    scheduling_policy="priority",
    enable_prompt_embeds=True,
    rpc_modules=("memory_methods",),
)


class Memory(NamedTuple):
    """Memory of the core process after a round.

    Attributes:
        malloc_bytes: allocated from the C library and not freed.
        python_blocks: allocated from Python's own allocator and not freed.
        rss_anon, rss_file: resident bytes.
    """

    malloc_bytes: int
    python_blocks: int
    rss_anon: int
    rss_file: int


class Soak:
    """A client of a core process that sends random rounds of requests and checks each outcome."""

    def __init__(self, core: CoreProcess, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
        self.stats = SchedulerStats()
        self._embeddings = load_file(DEMO_MODEL / "model.safetensors")["model.embed_tokens.weight"]
        self.happened = Counter[str]()
        self._core = core
        self._prefixes = [[self.rng.randrange(3, 300) for _ in range(60)] for _ in range(4)]
        self._known = self._ask(self.rng.sample([q for t in TASKS for q in held_out_questions(t)], 40))
        self._num_cases = 0

    def _ask(self, questions: list) -> list[tuple[list[int], list[int]]]:
        """Prompts and answers of questions asked one at a time, when nothing else runs."""
        known = []
        for question in questions:
            prompt = self.tokenizer.encode(question.prompt).ids
            params = SamplingParams(temperature=0.0, max_tokens=64)
            self._send(EngineCoreRequest(request_id="q", prompt_token_ids=prompt, sampling_params=params))
            whole = Whole()
            while whole.end is None:
                for output in self._outputs():
                    whole.take(output)
            known.append((prompt, whole.token_ids))
        return known

    def round(self) -> None:
        """A burst of requests, some aborted on the way, to its end; then the core must be as if nothing had been."""
        self.happened["rounds"] += 1
        # All at once, which is more than the cache has room for however fast the core is, or by and by.
        is_burst = self.rng.random() < 0.5
        waiting = {case.request.request_id: case for case in (self._case() for _ in range(self.rng.randint(1, 40)))}
        running: dict[str, Case] = {}
        wholes: dict[str, Whole] = {}
        aborted: set[str] = set()
        while waiting or running:
            while waiting and (is_burst or not running or self.rng.random() < 0.7):
                request_id, case = waiting.popitem()
                running[request_id], wholes[request_id] = case, Whole()
                self._send(case.request)
            if self.rng.random() < 0.02:
                self._send(UtilityCall(0, ResetPrefixCache()))
                self.happened["prefix caches reset"] += 1
            for output in self._outputs():
                wholes[output.request_id].take(output)
                if output.finished and output.request_id in running:
                    case = running.pop(output.request_id)
                    case.check(wholes[output.request_id])
                    self.happened[case.kind] += 1
            if self.rng.random() < 0.1:
                left = self.rng.sample(sorted(running), min(len(running), 2))
                self._send(AbortRequests(left))
                aborted.update(left)
                self.happened["aborted"] += len(left)
                for request_id in left:
                    del running[request_id]
        self._check_idle(aborted)
        if self.rng.random() < 0.1:
            self.sleep(self.rng.choice([1, 2]))

    def sleep(self, level: int) -> None:
        """Put the idle core to sleep and wake it up."""
        assert self._call(Sleep(level=level)).error is None
        assert self._call(WakeUp()).answer == SleepState()
        self.happened[f"sleeps of level {level}"] += 1

    def has_seen_enough(self) -> bool:
        self.happened["preemptions"] = self.stats.num_preemptions
        self.happened["prefix cache hits"] = self.stats.prefix_cache_hits
        return all(self.happened[what] >= times for what, times in ENOUGH.items())

    def memory(self) -> Memory:
        """Measure the idle core."""
        output = self._call(CollectiveRpc("live_memory"))
        assert isinstance(output.answer, RpcResult), output.error
        return Memory(*output.answer.result)

    def _case(self) -> Case:
        self._num_cases += 1
        request_id, kind = f"r{self._num_cases}", self.rng.random()
        if kind < 0.4:
            prompt, answer = self.rng.choice(self._known)
            embeds = encode_embeds(self._embeddings[prompt]) if kind < 0.1 else None
            return known_case(self.rng, request_id, prompt, answer, embeds)
        if kind < 0.55:
            return structured_case(self.rng, request_id, self.tokenizer.decode)
        return free_case(self.rng, request_id, self._prefixes)

    def _check_idle(self, aborted: set[str]) -> None:
        """Every block is free, nothing runs or waits, and the core's own check finds nothing wrong.

        What the core sent of ``aborted`` requests before it knew may still be on its way.
        """
        told = self._call(CheckInvariants(), aborted)
        assert isinstance(found := told.answer, Invariants), told.error
        assert found.num_free_blocks == found.num_blocks
        assert (found.num_running_reqs, found.num_waiting_reqs) == (0, 0)

    def _call(self, utility: Utility, aborted: set[str] | None = None) -> UtilityOutput:
        """The answer to a call; until it comes nobody but ``aborted`` requests has anything to say."""
        self._send(UtilityCall(1, utility))
        while not (isinstance(message := self._core.receive(), UtilityOutput) and message.call_id == 1):
            if isinstance(message, EngineCoreOutputs):
                assert {output.request_id for output in message.outputs} <= (aborted or set()), "an ended request spoke"
        return message

    def _outputs(self) -> list:
        message = self._core.receive()
        if isinstance(message, UtilityOutput):
            return []
        assert isinstance(message, EngineCoreOutputs)
        if message.scheduler_stats is not None:
            self.stats = message.scheduler_stats
        return message.outputs

    def _send(self, message: object) -> None:
        self._core.send(msgspec.msgpack.encode(message))


@pytest.fixture
def memory_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the core import ``MEMORY_METHODS``."""
    (tmp_path / "memory_methods.py").write_text(MEMORY_METHODS)
    monkeypatch.syspath_prepend(str(tmp_path))


def medians(memories: list[Memory]) -> Memory:
    return Memory(*(int(statistics.median(column)) for column in zip(*memories, strict=True)))


def test_everything_often_enough(memory_methods: None, core_process: CoreProcess) -> None:
    assert isinstance(core_process.start(CONFIG.encode()), Ready)
    soak = Soak(core_process, seed=20261121)
    # The first of each imports modules, which would count as growth if it came late.
    soak.sleep(level=1)
    soak.sleep(level=2)
    memories: list[Memory] = []
    while not soak.has_seen_enough():
        soak.round()
        memories.append(soak.memory())
        assert len(memories) < 20 * ENOUGH["rounds"], soak.happened
    third = len(memories) // 3
    before, after = medians(memories[third:-third]), medians(memories[-third:])
    report = f"{len(memories)} rounds: {before}, then {after}"
    assert after.malloc_bytes - before.malloc_bytes < MAX_BYTES_GROWTH, f"malloc's bytes grow; {report}"
    assert after.python_blocks - before.python_blocks < MAX_BLOCKS_GROWTH, f"Python's blocks grow; {report}"
