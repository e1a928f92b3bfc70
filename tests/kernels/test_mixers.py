"""Layers that keep states: the compiled kernel against the reference, in one step, in several, and in company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.kernels.dispatch import KernelInputError
from penstock.kernels.mixers import MixerKind, MixerState, MixerWeights, MixingBatch, has_kernel, mix, reference

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
HEADS, GROUPS, DIM, KEYS = 6, 2, 48, 24
LENGTHS = (9, 1, 4)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def weights_of(kind: MixerKind, *, clamps: bool = False) -> MixerWeights:
    if kind == MixerKind.CONVOLUTION:
        return MixerWeights(kind, random(3, 300), random(300), values_at=300, gate_at=0, strength_at=600)
    channels, values = HEADS * DIM + 2 * GROUPS * KEYS, HEADS * DIM
    is_delta = kind == MixerKind.DELTA_RULE
    return MixerWeights(
        kind,
        random(4, channels) * 0.5,
        None if is_delta else random(channels),
        values_at=0,
        gate_at=channels,
        strength_at=channels + values,
        step_at=channels + values + HEADS,
        num_heads=HEADS,
        num_groups=GROUPS,
        head_dim=DIM,
        key_dim=KEYS,
        decay=random(HEADS),
        step_bias=random(HEADS) - 1,
        skip=None if is_delta else random(HEADS),
        norm=random(DIM if is_delta else values),
        norm_size=DIM if is_delta else values // GROUPS,
        gates_first=not is_delta,
        eps=1e-5,
        smallest_step=0.3 if kind == MixerKind.SCAN and clamps else 0.0,
    )


def rows_of(weights: MixerWeights, dtype: torch.dtype) -> Tensor:
    width = 900 if weights.kind == MixerKind.CONVOLUTION else weights.step_at + HEADS
    return random(sum(LENGTHS), width).to(dtype)


def batch_of(lengths: list[int], reads: list[int], writes: list[int]) -> MixingBatch:
    return MixingBatch(*(torch.tensor(numbers) for numbers in (lengths, reads, writes)))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", list(MixerKind))
class TestMixers:
    def test_it_matches_the_reference(self, kind: MixerKind, dtype: torch.dtype) -> None:
        weights = weights_of(kind, clamps=True)
        rows = rows_of(weights, dtype)
        assert has_kernel(weights, CPU, dtype)
        ours, theirs = (MixerState.allocate(weights, 7, dtype, CPU) for _ in range(2))
        for state in (ours, theirs):
            state.recent[:3], state.states[:3] = random(*state.recent[:3].shape), random(*state.states[:3].shape)
            state.recent[3:], state.states[3:] = torch.nan, torch.nan
        batch = batch_of(list(LENGTHS), [2, -1, 0], [4, 5, 3])
        actual, expected = mix(rows, weights, ours, batch), reference.mix(rows, weights, theirs, batch)
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())
        torch.testing.assert_close(ours.recent[3:6], theirs.recent[3:6])
        torch.testing.assert_close(ours.states[:6], theirs.states[:6], rtol=tolerance, atol=4 * tolerance)
        assert ours.recent[6].isnan().all()

    def test_bits_do_not_depend_on_company_or_cuts(self, kind: MixerKind, dtype: torch.dtype) -> None:
        weights = weights_of(kind)
        rows = rows_of(weights, dtype)
        state = MixerState.allocate(weights, 6, dtype, CPU)
        whole = mix(rows, weights, state, batch_of(list(LENGTHS), [-1] * 3, [0, 1, 2])).split(LENGTHS)
        first = rows[: LENGTHS[0]]
        parts, read = [], -1
        for write, own in zip((3, 4, 3), first.split([2, 6, 1]), strict=True):
            parts.append(mix(own, weights, state, batch_of([len(own)], [read], [write])))
            read = write
        assert torch.equal(torch.cat(parts), whole[0])
        assert torch.equal(state.states[3], state.states[0])
        assert torch.equal(state.recent[3], state.recent[0])


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", list(MixerKind))
def test_columns_may_be_permuted(kind: MixerKind, dtype: torch.dtype) -> None:
    weights = weights_of(kind)
    rows = rows_of(weights, dtype)
    order = torch.randperm(rows.shape[1], generator=torch.Generator().manual_seed(1))
    shuffled = torch.empty_like(rows)
    shuffled[:, order] = rows
    batch = batch_of(list(LENGTHS), [-1] * 3, [0, 1, 2])
    for compute in (mix, reference.mix):
        one, other = (MixerState.allocate(weights, 3, dtype, CPU) for _ in range(2))
        plain = compute(rows, weights, one, batch)
        assert torch.equal(compute(shuffled, replace(weights, order=order), other, batch), plain)
        assert torch.equal(one.recent, other.recent)


@pytest.mark.usefixtures("compiled")
def test_sizes_that_do_not_fit_registers_use_the_reference() -> None:
    weights = replace(weights_of(MixerKind.SCAN), head_dim=40)
    assert not has_kernel(weights, CPU, torch.float32)
    assert not has_kernel(weights_of(MixerKind.SCAN), CPU, torch.float16)


def test_slots_and_rows_are_checked() -> None:
    weights = weights_of(MixerKind.CONVOLUTION)
    state = MixerState.allocate(weights, 2, torch.float32, CPU)
    with pytest.raises(KernelInputError, match=r"rows must be contiguous \[3, P\]"):
        mix(torch.zeros(4, 900), weights, state, batch_of([3], [-1], [0]))
    with pytest.raises(KernelInputError, match="order must have the 900 columns"):
        mix(torch.zeros(3, 900), replace(weights, order=torch.arange(5)), state, batch_of([3], [-1], [0]))
    with pytest.raises(KernelInputError, match="slots from 0 to 1"):
        mix(torch.zeros(3, 900), weights, state, batch_of([3], [-1], [2]))
