"""Graphs that follow between steps, and those of experts and of deterministic tiles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels import moe, paged_attention
from penstock.kernels.paged_attention import PagedBatch
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.ranks.follower import Follower
from penstock.worker.engine.ranks.memory import capture_next
from penstock.worker.engine.ranks.sharded_forward import ShardedForward
from penstock.worker.models.forward import Forward, ForwardSettings, ModelInput
from penstock.worker.models.lean import captured
from penstock.worker.models.lean.captured import (
    CapturedForward,
    make_captured,
)
from penstock.worker.models.lean.forward import LeanForward
from penstock.worker.models.lean.layers.feed_forward import SparseMlp
from penstock.worker.models.lean.step_graphs import DecodeGraphs, GraphLayout, PromptGraphs
from penstock.worker.models.loaded import LoadedModel
from penstock.worker.models.loading import fixed_shapes
from penstock.worker.models.loading.fixed_shapes import choose_tile_sizes

from ..lean_models import make_model, poison
from .harness import (
    BLOCK_SIZE,
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    NUM_REPLAYED,
    SHORT,
    SMALLEST,
    TOKEN_BUDGET,
    WORK,
    Recording,
    allocate,
    assert_equal,
    lean_forward,
    run,
    smallest_forward,
)

pytestmark = pytest.mark.usefixtures("interpreted_kernels")


@torch.inference_mode()
def test_other_sizes_follow_between_steps(
    device: torch.device, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "first_sizes", lambda sizes: frozenset(sizes[-1:]))
    lean, forward = smallest_forward(device), CapturedForward(smallest_forward(device), TOKEN_BUDGET, recording)
    allocate(lean, device, MAX_NUM_SEQS)
    allocate(forward, device, MAX_NUM_SEQS)
    # One row, two and four are missing.
    assert (recording.num_captured, forward.num_uncaptured) == (2, 3)
    expected = run(lean, device, WORK)
    assert_equal(run(forward, device, WORK), expected)
    assert (recording.num_captured, recording.num_replayed) == (2, NUM_REPLAYED)
    # The blocks of the last step belong to other requests now.
    for cache in forward.caches:
        cache.fill_(7)
    while capture_next(loaded(forward), nullcontext):
        pass
    assert all((cache == 7).all() for cache in forward.caches)
    assert recording.num_captured == 5
    poison(forward.caches)
    assert_equal(run(forward, device, WORK), expected)
    assert_equal(forward.caches, lean.caches)
    assert (recording.num_captured, recording.num_replayed) == (5, 2 * NUM_REPLAYED)
    forward.allocate(0, BLOCK_SIZE, 0, device)
    assert forward.num_uncaptured == 0, "a sleeping cache has no graphs"


@torch.inference_mode()
def test_without_memory_for_more_graphs_steps_use_those_that_there_are(
    device: torch.device, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "first_sizes", lambda sizes: frozenset(sizes[-1:]))
    forward = CapturedForward(smallest_forward(device), TOKEN_BUDGET, recording)
    allocate(forward, device)
    expected = run(forward, device)

    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward.lean, "transform", no_memory)
        forward.capture_next()
    assert forward.num_uncaptured == 0
    poison(forward.caches)
    assert_equal(run(forward, device), expected)


class OtherRank:
    """The only other rank of an engine, which runs the commands of rank 0 by its own code, but in this process."""

    def __init__(self, model: LoadedModel) -> None:
        config = EngineConfig(model="m", block_size=BLOCK_SIZE)
        self._follower = Follower(config, model, 1, Path(), lambda _: model.network)

    def send(self, command: Any) -> None:
        self._follower.do(command)

    def compute(self, command: Any, act: Callable[[], Any]) -> tuple[Any, list[Any]]:
        return act(), [self._follower.do(command)]

    together = compute


@torch.inference_mode()
def test_ranks_capture_the_same_graphs_between_steps(
    device: torch.device, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "first_sizes", lambda sizes: frozenset(sizes[-1:]))
    lean = smallest_forward(device)
    ours, theirs = (CapturedForward(smallest_forward(device), TOKEN_BUDGET, each) for each in (recording, Recording()))
    for each in (ours, theirs):
        groups: Any = object()
        each.lean._settings = replace(each.lean._settings, groups=groups)
    team: Any = OtherRank(loaded(theirs))
    forward = ShardedForward(ours, team)
    for one in (lean, forward):
        one.allocate(NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, device)
    # As for one rank: one row, two and four are missing.
    assert (recording.num_captured, forward.num_uncaptured) == (2, 3)
    expected = run(lean, device, WORK)
    assert_equal(run(forward, device, WORK), expected)
    assert capture_next(loaded(forward), nullcontext)
    # Two rows and four are asked for more often than one.
    assert captured_sizes(ours) == captured_sizes(theirs)
    assert (1,) not in captured_sizes(ours)
    while capture_next(loaded(forward), nullcontext):
        pass
    assert captured_sizes(ours) == captured_sizes(theirs)
    assert (forward.num_uncaptured, theirs.num_uncaptured) == (0, 0)
    assert_equal(run(forward, device, WORK), expected)
    assert_equal(theirs.caches, lean.caches)

    # A rank that has no memory ends the engine: the other one may wait for it.
    forward.allocate(NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, device)

    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(theirs.lean, "transform", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        capture_next(loaded(forward), nullcontext)


def captured_sizes(forward: CapturedForward) -> list[tuple[int, ...]]:
    """Return the sizes of all graphs, in the order in which they were captured."""
    assert forward._graphs is not None
    return [size for graphs in forward._graphs.kinds for size, _ in graphs._replays]


def counting_graphs(replays: list[int]) -> tuple[GraphLayout, Callable[[ModelInput, Tensor], Callable[[], None]]]:
    """A layout, and a function that captures nothing: a replay appends the number of tokens of its graph."""

    def capture(step: ModelInput, out: Tensor) -> Callable[[], None]:
        return lambda: replays.append(len(step.token_ids))

    return GraphLayout(8, 1, BLOCK_SIZE, 32, 3, torch.zeros(1, 4), (False,)), capture


def step_of(query_lens: list[int]) -> ModelInput:
    num_rows, num_tokens = len(query_lens), sum(query_lens)
    batch = PagedBatch(torch.zeros(num_rows, 2).long(), torch.arange(num_tokens), query_lens, query_lens, BLOCK_SIZE)
    tokens = torch.zeros(num_tokens).long()
    return ModelInput(tokens, tokens, torch.arange(num_rows), batch, np.zeros(num_rows, np.int64))


def test_the_size_that_most_steps_would_take_is_captured_next() -> None:
    replays: list[int] = []
    layout, capture = counting_graphs(replays)
    graphs = DecodeGraphs((1, 2, 3, 4), frozenset((2, 4)), layout, capture)
    for num_rows in (3, 1, 1, 2, 4):
        graphs.replay(step_of([1] * num_rows))
    assert replays == [4, 2, 2, 2, 4]
    for num_captured in (3, 4):
        replays.clear()
        graphs.capture_next()
        assert len(graphs) == num_captured
        graphs.replay(step_of([1]))
        graphs.replay(step_of([1, 1, 1]))
        # One row was asked for twice, three rows once.
        assert replays == [1, 4 if num_captured == 3 else 3]
    assert (graphs.num_uncaptured, graphs.num_wishes) == (0, -1)
    assert graphs.replay(step_of([1] * 5)) is None


def test_prompts_take_more_rows_rather_than_more_tokens() -> None:
    replays: list[int] = []
    layout, capture = counting_graphs(replays)
    graphs = PromptGraphs((4, 6, 8), (2, 4), frozenset((4, 8)), layout, capture)
    assert (len(graphs), graphs.num_uncaptured) == (2, 4)
    for query_lens in ([3], [3, 2], [1, 3, 2], [3, 5]):
        graphs.replay(step_of(query_lens))
    assert replays == [4, 8, 8, 8]
    # Each missing graph was asked for once; the first of them are eight tokens of two rows and six tokens of four.
    graphs.capture_next()
    graphs.capture_next()
    replays.clear()
    for query_lens in ([3, 2], [1, 3, 2]):
        graphs.replay(step_of(query_lens))
    assert len(graphs) == 4
    assert replays == [6, 6]
    assert graphs.replay(step_of([9])) is None


@pytest.fixture
def experts_of_gpus(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        from penstock.kernels.moe import gpu

        monkeypatch.setitem(moe._EXPERTS, "cpu", gpu.experts)
        monkeypatch.setitem(moe._ROUTE, "cpu", gpu.route)


@pytest.mark.usefixtures("references", "experts_of_gpus")
@torch.inference_mode()
def test_experts_are_captured(device: torch.device, recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host never reads which experts tokens choose, so the same graph serves other choices."""
    lean, other = (lean_forward("mixtral", device, **SMALLEST) for _ in range(2))
    assert any(isinstance(part, SparseMlp) for part in other.network.modules())
    with monkeypatch.context() as patch:
        patch.setattr(captured, "is_capturable", lambda *_: True)
        forward = make_captured(other, TOKEN_BUDGET)
    assert isinstance(forward, CapturedForward)
    forward._make_recorder = recording
    allocate(lean, device)
    allocate(forward, device)
    assert_equal(run(forward, device), run(lean, device))
    assert recording.num_replayed == len(SHORT)


@torch.inference_mode()
def test_deterministic_tiles_are_replayed_with_the_bits_of_single_operations(
    device: torch.device, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        from penstock.kernels.paged_attention import gpu as attention_on_gpu

        monkeypatch.setitem(
            paged_attention._INVARIANT_IMPLEMENTATIONS, "cpu", attention_on_gpu.invariant_paged_attention
        )
        # The interpreter is slow.
        monkeypatch.setattr(captured, "TILE_SIZES", (1, 2, 4))
        monkeypatch.setattr(fixed_shapes, "_TILE_SIZES", [2, 4])
    models = [make_model("llama", torch.float32, **SMALLEST) for _ in range(2)]
    for each in models:
        torch.nn.Module.to(each, device)
    lean, other = (LeanForward(each, ForwardSettings(64, is_batch_invariant=True)) for each in models)
    forward = CapturedForward(other, TOKEN_BUDGET, recording)
    model = loaded(forward)
    sizes = choose_tile_sizes(model)
    # Every forward but the two that show their operations, for each of two sizes.
    assert recording.num_replayed > 0
    num_replayed = recording.num_replayed
    for one in (lean, forward):
        allocate(one, device, num_slots=1)
    tokens = np.arange(7)
    packed = fixed_shapes.PackedTokens(
        token_ids=tokens,
        positions=tokens,
        slot_mapping=tokens + 2 * BLOCK_SIZE,
        block_table=np.arange(2, 6)[None],
        table_rows=np.zeros(7, np.int64),
        logit_rows=np.array([2, 6]),
    )
    ours, theirs = (fixed_shapes.forward_in_tiles(each, packed, sizes, BLOCK_SIZE) for each in (model, loaded(lean)))
    assert torch.equal(ours, theirs)
    assert recording.num_replayed == num_replayed + -(-7 // sizes[-1])


def loaded(forward: Forward) -> LoadedModel:
    return LoadedModel(
        forward=forward,
        folder=Path(),
        architecture="llama",
        max_model_len=64,
        is_length_chosen=False,
        vocab_size=97,
        eos_token_ids=[],
        num_parameters=0,
        attention_backend="triton",
    )
