"""Reference in plain torch, token by token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .weights import MixerKind, MixerState, MixerWeights, MixingBatch

_SMALLEST_LENGTH = 1e-6


def mix(rows: Tensor, weights: MixerWeights, state: MixerState, batch: MixingBatch) -> Tensor:
    """See ``mixers.mix``."""
    outputs = []
    rows = rows if weights.order is None else rows[:, weights.order]
    requests = rows.split(batch.query_lens.tolist())
    for request, read, write in zip(requests, batch.reads.tolist(), batch.writes.tolist(), strict=True):
        mixed = _convolve(request, weights, state, read, write)
        if weights.kind == MixerKind.CONVOLUTION:
            num_channels = weights.taps.shape[1]
            outputs.append(mixed * request[:, weights.gate_at : weights.gate_at + num_channels])
        else:
            outputs.append(_recur(request, F.silu(mixed), weights, state, read, write))
    return torch.cat(outputs)


def _convolve(rows: Tensor, weights: MixerWeights, state: MixerState, read: int, write: int) -> Tensor:
    num_taps, num_channels = weights.taps.shape
    inputs = rows[:, weights.values_at : weights.values_at + num_channels]
    if weights.kind == MixerKind.CONVOLUTION:
        inputs = inputs * rows[:, weights.strength_at : weights.strength_at + num_channels]
    recent = torch.zeros_like(state.recent[0]) if read < 0 else state.recent[read]
    window = torch.cat([recent, inputs])
    state.recent[write] = window[len(window) - num_taps + 1 :]
    convolved = F.conv1d(window.float().T[None], weights.taps.T[:, None], weights.taps_bias, groups=num_channels)
    return convolved[0].T.to(rows.dtype)


def _recur(rows: Tensor, mixed: Tensor, weights: MixerWeights, state: MixerState, read: int, write: int) -> Tensor:
    assert weights.decay is not None
    assert weights.step_bias is not None
    heads, groups, dim, key_dim = weights.num_heads, weights.num_groups, weights.head_dim, weights.key_dim
    steps = rows[:, weights.step_at : weights.step_at + heads]
    keys, all_values = groups * key_dim, heads * dim
    if weights.kind == MixerKind.DELTA_RULE:
        query, key, value = mixed.float().split([keys, keys, all_values], dim=1)
        query, key = (_normalize(part.unflatten(1, (groups, key_dim))) for part in (query, key))
        query = query * key_dim**-0.5
        step = F.softplus(steps.float() + weights.step_bias)
        strength = rows[:, weights.strength_at : weights.strength_at + heads].sigmoid().float()
    else:
        value, key, query = mixed.float().split([all_values, keys, keys], dim=1)
        key, query = (part.unflatten(1, (groups, key_dim)) for part in (key, query))
        step, strength = F.softplus(steps + weights.step_bias.to(rows.dtype)).float(), None
        if len(rows) > 1 or read < 0:
            step = step.clamp(min=weights.smallest_step)
    key, query = (part.repeat_interleave(heads // groups, 1) for part in (key, query))
    value = value.unflatten(1, (heads, dim))
    decay = (-weights.decay.exp() * step).exp()
    matrix = torch.zeros_like(state.states[0]) if read < 0 else state.states[read].clone()
    outputs = []
    for t in range(len(rows)):
        matrix = matrix * decay[t, :, None, None]
        if strength is None:
            update = value[t] * step[t, :, None]
        else:
            update = (value[t] - (matrix * key[t, :, :, None]).sum(1)) * strength[t, :, None]
        matrix = matrix + key[t, :, :, None] * update[:, None]
        outputs.append((matrix * query[t, :, :, None]).sum(1))
    state.states[write] = matrix
    out = torch.stack(outputs)
    if weights.skip is not None:
        out = out + weights.skip[:, None] * value
    gate = rows[:, weights.gate_at : weights.gate_at + all_values]
    return _norm_and_gate(out.flatten(1).to(rows.dtype), gate, weights)


def _normalize(rows: Tensor) -> Tensor:
    return rows * (rows.square().sum(-1, keepdim=True) + _SMALLEST_LENGTH).rsqrt()


def _norm_and_gate(rows: Tensor, gate: Tensor, weights: MixerWeights) -> Tensor:
    assert weights.norm is not None
    factor, values = F.silu(gate.float()), rows.float()
    if weights.gates_first:
        values = values * factor
    parts = values.unflatten(1, (-1, weights.norm_size))
    scaled = (parts * (parts.square().mean(-1, keepdim=True) + weights.eps).rsqrt()).flatten(1).to(rows.dtype)
    repeated = weights.norm.repeat(rows.shape[1] // len(weights.norm))
    weighted = (scaled.float() * repeated).to(rows.dtype)
    return weighted if weights.gates_first else (weighted.float() * factor).to(rows.dtype)
