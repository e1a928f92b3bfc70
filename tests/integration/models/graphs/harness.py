"""Small forwards that are captured, steps for them, and what counts their graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.worker.models.forward import Forward, ForwardSettings, ModelInput
from penstock.worker.models.lean.captured import (
    CapturedForward,
    CudaGraphRecorder,
    capture_sizes,
)
from penstock.worker.models.lean.forward import LeanForward

from ..lean_models import make_model, make_step, poison

BLOCK_SIZE = 4
NUM_BLOCKS = 60
MAX_NUM_SEQS = 5
# Two prompts in chunks, decodes beside the others; then decodes of each number of rows, of growing requests, in
# changing rows; a prompt of one token, which is a decode; and chunks and decodes again.
WORK: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 6), (1, 3), (2, 5)),
    ((0, 1), (1, 3), (3, 2)),
    ((0, 1), (1, 1), (2, 1)),
    ((4, 1),),
    ((3, 1), (1, 1), (4, 1), (0, 1), (2, 1)),
    ((2, 1), (0, 1)),
    ((0, 1), (2, 1), (3, 1), (4, 1)),
    ((1, 1), (4, 3)),
    ((4, 1), (2, 1), (3, 1)),
    ((0, 1), (1, 1), (2, 1), (3, 1), (4, 1)),
)
SHORT = (((0, 3), (1, 2)), ((0, 1), (1, 1)), ((2, 1), (0, 1), (1, 1)), ((1, 1),))
# One layer, one group of heads.
SMALLEST = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
# The first step of ``WORK`` is larger.
TOKEN_BUDGET = 12
NUM_REPLAYED = sum(
    sum(num_new for _, num_new in work) <= TOKEN_BUDGET or all(num_new == 1 for _, num_new in work) for work in WORK
)


def num_graphs(max_num_seqs: int) -> int:
    """Return the number of graphs: those of decodes, and one for all steps with prompts."""
    return len(capture_sizes(max_num_seqs)) + 1


class Recording:
    """Makes recorders, and counts what they record and what is replayed."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0
        self.replays: list[weakref.ref[Callable[[], None]]] = []

    def __call__(self, device: torch.device) -> Callable[[Callable[[], object]], Callable[[], None]]:
        record = CudaGraphRecorder(device) if device.type == "cuda" else _run_again

        def record_counted(function: Callable[[], object]) -> Callable[[], None]:
            once_more = record(function)
            self.num_captured += 1

            def replay() -> None:
                self.num_replayed += 1
                once_more()

            self.replays.append(weakref.ref(replay))
            return replay

        return record_counted


def _run_again(function: Callable[[], object]) -> Callable[[], None]:
    function()
    return lambda: (function(), None)[1]


def lean_forward(variant: str, device: torch.device, max_model_len: int = 64, **changed: Any) -> LeanForward:
    model = make_model(variant, torch.float32, **changed)
    torch.nn.Module.to(model, device)
    return LeanForward(model, ForwardSettings(max_model_len))


def smallest_forward(device: torch.device) -> LeanForward:
    """The interpreter is slow."""
    return lean_forward("llama", device, **SMALLEST)


def allocate(
    forward: LeanForward | CapturedForward, device: torch.device, num_slots: int = 3, num_blocks: int = NUM_BLOCKS
) -> None:
    """Caches in which what no token was stored in is NaN."""
    forward.allocate(num_blocks, BLOCK_SIZE, num_slots, device)
    poison(forward.caches)


def steps(device: torch.device, works: Sequence[Sequence[tuple[int, int]]] = SHORT) -> list[ModelInput]:
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(0, 97, (MAX_NUM_SEQS, 30), generator=generator)
    table = torch.randperm(NUM_BLOCKS, generator=generator)[: MAX_NUM_SEQS * 8].view(MAX_NUM_SEQS, 8)
    computed = [0] * MAX_NUM_SEQS
    return [make_step(work, computed, token_ids.to(device), table.to(device), BLOCK_SIZE) for work in works]


def run(forward: Forward, device: torch.device, works: Sequence[Sequence[tuple[int, int]]] = SHORT) -> list[Tensor]:
    return [forward.run(step) for step in steps(device, works)]


def fed(step: ModelInput) -> ModelInput:
    """The same step with its first tokens on the device alone, last token first."""
    token_ids, num_fed = step.token_ids.clone(), min(2, len(step.token_ids))
    token_ids[:num_fed] = torch.arange(-1, -1 - num_fed, -1)
    return replace(step, token_ids=token_ids, fed_tokens=step.token_ids[:num_fed].flip(0))


def assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        # The sums of a row follow the bound on its length and the number of rows, so the last bits may differ.
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)
