"""Decodes that are captured and replayed give what the same operations give one by one.

On a GPU with real graphs; elsewhere a replay runs the captured function again, with the kernels of a GPU by Triton's
interpreter: so what is tested there is what lies in the buffers, not the capture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.kernels import paged_attention
from penstock.kernels.paged_attention import PagedBatch
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.models.adapters.attach import attach_adapters
from penstock.worker.models.adapters.peft_folder import LayerMatrices
from penstock.worker.models.adapters.targets import layers_of, targets_of
from penstock.worker.models.attention.pages import plan_pages
from penstock.worker.models.forward import ForwardSettings, ModelInput
from penstock.worker.models.lean import captured, step_graphs
from penstock.worker.models.lean.captured import (
    CapturedForward,
    capture_sizes,
    first_sizes,
    make_captured,
    row_sizes,
    token_sizes,
)
from penstock.worker.models.lean.forward import LeanForward
from penstock.worker.models.lean.step_graphs import DecodeGraphs, GraphLayout, on_device
from penstock.worker.models.loading.preparing import prepare, use_eight_bit_cache

from ..lean_models import SETTINGS, in_groups, make_model, poison
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
    fed,
    lean_forward,
    num_graphs,
    run,
    smallest_forward,
    steps,
)

pytestmark = pytest.mark.usefixtures("interpreted_kernels")


# Several layers and groups of heads in one of them: the interpreter is slow. With 128 a graph splits the keys, which
# single operations do not with requests as short as here.
@pytest.mark.parametrize(
    ("variant", "max_model_len", "shape"),
    [
        ("llama", 64, {"num_hidden_layers": 2}),
        ("qwen3", 128, SMALLEST),
        ("mistral, with a window", 64, SMALLEST),
        ("cohere", 64, {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}),
    ],
)
@torch.inference_mode()
def test_logits_and_caches_are_those_of_single_operations(
    variant: str, max_model_len: int, shape: dict[str, int], device: torch.device, recording: Recording
) -> None:
    lean, other = (lean_forward(variant, device, max_model_len, **shape) for _ in range(2))
    forward = CapturedForward(other, TOKEN_BUDGET, recording)
    allocate(lean, device, MAX_NUM_SEQS)
    allocate(forward, device, MAX_NUM_SEQS)
    # All at the end: a step may not change what an earlier one has returned.
    assert_equal([forward.run(fed(step)) for step in steps(device, WORK)], run(lean, device, WORK))
    assert_equal(forward.caches, lean.caches)
    assert not any(cache.isfinite().all() for cache in forward.caches), "a row that is not in use was stored"
    assert (recording.num_captured, recording.num_replayed) == (num_graphs(MAX_NUM_SEQS), NUM_REPLAYED)


@torch.inference_mode()
def test_each_group_of_layers_has_its_table_in_the_buffers(device: torch.device, recording: Recording) -> None:
    """Blocks outside windows of five tokens are null blocks."""
    lean, other = (lean_forward("gemma3", device, **{**SMALLEST, "num_hidden_layers": 2}) for _ in range(2))
    forward = CapturedForward(other, TOKEN_BUDGET, recording)
    layout = plan_pages(forward.attention_calls, 1000, BLOCK_SIZE)
    assert layout is not None
    null_block = NUM_BLOCKS * len(layout.windows)
    allocate(lean, device, 2)
    forward.allocate_pages(layout, null_block + 1, BLOCK_SIZE, 2, device)
    poison(forward.caches)
    works = (((0, 9), (1, 2)), ((0, 1), (1, 1)), ((0, 1),))
    grouped = [in_groups(step, layout, null_block) for step in steps(device, works)]
    assert_equal([forward.run(step) for step in grouped], run(lean, device, works))
    assert (recording.num_captured, recording.num_replayed) == (num_graphs(2), 3)


# Rows that fill a graph up are computed with whatever lies in memory, and nobody reads them.
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@torch.inference_mode()
def test_adapters_have_separate_graphs(device: torch.device, recording: Recording) -> None:
    lean, other = smallest_forward(device), smallest_forward(device)
    forward = CapturedForward(other, TOKEN_BUDGET, recording)
    generator = torch.Generator().manual_seed(3)
    matrices = [
        {
            layer: LayerMatrices(
                torch.randn(rank, num_inputs, generator=generator), torch.randn(num_outputs, rank, generator=generator)
            )
            for layer, (num_inputs, num_outputs) in layers_of(targets_of(lean.network)).items()
        }
        for rank in (2, 4)
    ]
    for one in (lean, forward):
        slots = attach_adapters(one, "llama", num_slots=2, max_rank=4, is_deterministic=False)
        for slot, adapter in enumerate(matrices):
            slots.assign(slot, slots.prepare(adapter))
        slots.flush()
        allocate(one, device, MAX_NUM_SEQS)
    plain = steps(device, WORK)
    adapted = [
        replace(step, token_lora=torch.arange(len(step.token_ids), device=device) % 3 - 1 if index % 3 else None)
        for index, step in enumerate(plain)
    ]
    found = [forward.run(step) for step in adapted]
    assert_equal(found, [lean.run(step) for step in adapted])
    assert recording.num_captured == 2 * num_graphs(MAX_NUM_SEQS)
    assert recording.num_replayed == NUM_REPLAYED
    base = [lean.run(step) for step in plain]
    assert not any(torch.allclose(ours, theirs) for ours, theirs in zip(found[1:3], base[1:3], strict=True))


class _Copies(TorchDispatchMode):
    """Counts copies from one tensor into another."""

    num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_copies += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def test_all_inputs_of_a_step_are_copied_at_once() -> None:
    """Besides the block table, which is copied on from there to its place."""
    layout = GraphLayout(8, 1, BLOCK_SIZE, 32, 3, torch.zeros(1, 4), (False, True))
    batch = PagedBatch(torch.tensor([[3, 4], [5, 6]]), torch.tensor([13, 20]), [1, 1], [6, 1], BLOCK_SIZE)
    step = ModelInput(
        torch.tensor([7, 8]),
        torch.tensor([5, 0]),
        torch.tensor([0, 1]),
        batch,
        np.zeros(2, np.int64),
        token_lora=torch.tensor([0, 1]),
    )
    captured_steps: list[ModelInput] = []

    def capture(captured_step: ModelInput, out: Tensor) -> Callable[[], None]:
        captured_steps.append(captured_step)
        return lambda: None

    graphs = DecodeGraphs((1, 3), frozenset((1, 3)), layout, capture)
    with _Copies() as copies:
        assert graphs.replay(step) is not None
    assert copies.num_copies == 2
    (largest,) = (each for each in captured_steps if len(each.token_ids) == 3 and each.token_lora is not None)
    assert [largest.token_ids.tolist(), largest.positions.tolist()] == [[7, 8, 0], [5, 0, 0]]
    assert largest.token_lora is not None
    assert largest.token_lora.tolist() == [0, 1, -1]
    assert largest.batch.slot_mapping.tolist() == [13, 20, -1]
    assert largest.batch.device_rows.seq_lens.tolist() == [6, 1, 0]
    assert largest.batch.block_table[:2, :2].tolist() == [[3, 4], [5, 6]]


def test_a_step_that_no_graph_takes_moves_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "to_device", lambda array, device: torch.from_numpy(array).to(device))
    table = torch.tensor([[[3], [4]]])
    batch = PagedBatch(table[0], torch.tensor([13, 16]), [1, 1], [2, 1], BLOCK_SIZE, group_tables=table)
    step = ModelInput(torch.tensor([7, 8]), torch.tensor([1, 0]), torch.tensor([1]), batch, np.zeros(2, np.int64))
    moved = on_device(step, torch.device("meta"))
    tensors = moved.token_ids, moved.positions, moved.logit_rows, moved.batch.slot_mapping, moved.batch.group_tables
    assert all(tensor is not None and tensor.device.type == "meta" for tensor in tensors)
    assert (moved.batch.query_lens, moved.batch.seq_lens, moved.token_lora) == ([1, 1], [2, 1], None)
    assert on_device(moved, torch.device("meta")) is moved


@torch.inference_mode()
def test_new_caches_are_captured_again_and_old_graphs_are_freed(device: torch.device, recording: Recording) -> None:
    forward = CapturedForward(smallest_forward(device), TOKEN_BUDGET, recording)
    allocate(forward, device)
    expected = run(forward, device)
    old_graphs = recording.replays[:]
    allocate(forward, device, num_blocks=NUM_BLOCKS + 7)
    assert not any(graph() for graph in old_graphs)
    assert_equal(run(forward, device), expected)
    forward.allocate(0, BLOCK_SIZE, 0, device)
    assert not any(graph() for graph in recording.replays), "a sleeping cache leaves graphs behind"


@torch.inference_mode()
def test_weights_that_have_moved_are_captured_anew(device: torch.device, recording: Recording) -> None:
    forward = CapturedForward(smallest_forward(device), TOKEN_BUDGET, recording)
    allocate(forward, device)
    expected = run(forward, device)
    before = [(parameter, parameter.data) for parameter in forward.network.parameters()]
    for parameter, data in before:
        parameter.data = data.clone()
        data.fill_(float("nan"))
    num_captured = recording.num_captured
    poison(forward.caches)
    assert_equal(run(forward, device), expected)
    assert recording.num_captured == 2 * num_captured


@torch.inference_mode()
def test_a_cache_may_wake_up_before_the_weights(device: torch.device, recording: Recording) -> None:
    forward = CapturedForward(smallest_forward(device), TOKEN_BUDGET, recording)
    allocate(forward, device)
    expected = run(forward, device)
    num_captured = recording.num_captured
    weight = forward.network.embed_tokens.weight
    forward.network.embed_tokens.weight = torch.nn.Parameter(weight.to("meta"), requires_grad=False)
    allocate(forward, device)
    assert recording.num_captured == num_captured
    forward.network.embed_tokens.weight = weight
    for _ in range(2):
        forward.capture()
        assert recording.num_captured == 2 * num_captured
    assert_equal(run(forward, device), expected)
    assert recording.num_captured == 2 * num_captured


@torch.inference_mode()
def test_logits_of_some_rows_and_of_none(device: torch.device, recording: Recording) -> None:
    forward = CapturedForward(smallest_forward(device), TOKEN_BUDGET, recording)
    allocate(forward, device)
    *first, last = steps(device, SHORT[:3])
    for step in first:
        forward.run(step)
    whole = forward.run(last)
    rows = torch.tensor([0, 2], device=device)
    assert_equal([forward.run(replace(last, logit_rows=rows))], [whole[rows]])
    assert forward.run(replace(last, logit_rows=rows[:0])).shape == (0, whole.shape[1])


@torch.inference_mode()
def test_embeddings_and_batches_beyond_the_largest_go_one_by_one(device: torch.device, recording: Recording) -> None:
    lean, forward = smallest_forward(device), CapturedForward(smallest_forward(device), TOKEN_BUDGET, recording)
    allocate(lean, device)
    forward.allocate(NUM_BLOCKS, BLOCK_SIZE, 2, device)
    *first, last = steps(device, SHORT[:3])
    for step in first:
        lean.run(step)
        forward.run(step)
    num_replayed = recording.num_replayed
    assert_equal([forward.run(last)], [lean.run(last)])
    pair = steps(device)[1]
    given = replace(pair, inputs_embeds=forward.network.embed_tokens(pair.token_ids))
    assert_equal([forward.run(given)], [lean.run(pair)])
    assert recording.num_replayed == num_replayed


@pytest.mark.parametrize(
    ("name", "dtypes"), [("fp8_e4m3", {torch.float8_e4m3fn}), ("int8", {torch.int8, torch.bfloat16})]
)
@torch.inference_mode()
def test_caches_of_eight_bits(name: str, dtypes: set[torch.dtype], device: torch.device, recording: Recording) -> None:
    plain, lean, other = (smallest_forward(device) for _ in range(3))
    for one in (lean, other):
        use_eight_bit_cache(one, name, 97, 64)
    forward = CapturedForward(other, TOKEN_BUDGET, recording)
    for one in (plain, lean, forward):
        allocate(one, device)
    assert {cache.dtype for cache in forward.caches} == dtypes
    assert (
        sum(cache.nbytes for cache in forward.caches) == forward.bytes_per_token * forward.caches[0][:, :, 0, 0].numel()
    )
    assert forward.bytes_per_token < 0.4 * plain.bytes_per_token
    found = run(forward, device)
    assert_equal(found, run(lean, device))
    for ours, theirs in zip(found, run(plain, device), strict=True):
        assert 0 < (ours - theirs).norm() < 0.2 * theirs.norm()


def test_sizes() -> None:
    assert first_sizes(capture_sizes(300)) == {1, 2, 4, 8, 16, 32, 64, 128, 256, 300}
    assert first_sizes((32, 96, 128, 1000)) == {32, 128, 1000}
    assert first_sizes(()) == frozenset()
    assert row_sizes(5) == (5,)
    assert row_sizes(64) == (16, 64)
    assert row_sizes(1000) == (16, 512)
    assert capture_sizes(1) == (1,)
    assert capture_sizes(5) == (1, 2, 4, 5)
    assert capture_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert capture_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert capture_sizes(300)[-4:] == (248, 256, 288, 300)
    assert capture_sizes(2000)[-2:] == (480, 512)
    assert len(capture_sizes(2000)) == 43


def test_steps_with_prompts_are_captured_as_far_as_the_host_takes_longest() -> None:
    def network(num_weights: int) -> torch.nn.Module:
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(torch.empty(num_weights, device="meta"))
        return torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer, layer])})

    assert token_sizes(2048, network(16_000_000))[-3:] == (1024, 1536, 2048)
    assert token_sizes(2000, network(16_000_000))[-3:] == (1024, 1536, 2000)
    assert token_sizes(8192, network(16_000_000))[-1] == 2048
    assert token_sizes(2048, network(193_000_000))[-2:] == (768, 1024)
    assert token_sizes(20, network(16_000_000)) == (20,)
    assert token_sizes(1, network(16_000_000)) == ()


@torch.inference_mode()
def test_no_step_with_a_prompt_may_be_captured(device: torch.device, recording: Recording) -> None:
    """Happens if the weights of a layer are large."""
    lean, forward = smallest_forward(device), CapturedForward(smallest_forward(device), 1, recording)
    allocate(lean, device)
    allocate(forward, device)
    forward.profile_graphs(MAX_NUM_SEQS)
    assert_equal(run(forward, device), run(lean, device))
    assert recording.num_captured == len(capture_sizes(3))


@pytest.mark.usefixtures("references")  # by the compiled decoder's plan experts are none of transformers
def test_forwards_that_cannot_be_captured_are_returned_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    lean = LeanForward(make_model("llama", torch.float32), SETTINGS)
    assert make_captured(lean, TOKEN_BUDGET) is lean, "there is no kernel for it on a CPU"
    monkeypatch.setattr(captured, "is_capturable", lambda *_: True)
    assert isinstance(make_captured(lean, TOKEN_BUDGET), CapturedForward)
    ranks: Any = object()
    settings = ForwardSettings(64, is_batch_invariant=True)
    invariant = LeanForward(make_model("llama", torch.float32), settings)
    assert isinstance(make_captured(invariant, TOKEN_BUDGET), CapturedForward)
    shared = LeanForward(make_model("llama", torch.float32), settings)
    shared._settings = replace(settings, groups=ranks)
    experts = LeanForward(make_model("mixtral", torch.float32), SETTINGS)
    follows_batch = LeanForward(make_model("llama", torch.float32), SETTINGS)
    rotary: Any = follows_batch.network.rotary_embs[0]
    rotary.rope_type = "dynamic"
    for other in (shared, experts, follows_batch):
        assert make_captured(other, TOKEN_BUDGET) is other


def test_only_kernels_of_a_gpu_can_be_captured() -> None:
    assert not paged_attention.is_capturable(torch.device("cpu"), torch.float32)
    assert not paged_attention.is_capturable(torch.device("cuda"), torch.float64)
    assert paged_attention.is_capturable(torch.device("cuda"), torch.bfloat16)


def test_a_gpu_engine_captures_unless_eager_mode_is_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "is_capturable", lambda *_: True)
    lean = LeanForward(make_model("llama", torch.float32), SETTINGS)
    for enforce_eager, kind in (False, CapturedForward), (True, LeanForward):
        config = EngineConfig.decode(EngineConfig(model="m", device="cuda", enforce_eager=enforce_eager).encode())
        assert type(prepare(lean, config, torch.device("cuda"), 97, 64)) is kind
