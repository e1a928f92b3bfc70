"""Inputs of paged attention with NaN wherever nothing may be read, and the truth in float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.kv_cache import scales_per_head
from penstock.kernels.kv_cache.reference import dequantize_bytes, quantize_to_bytes
from penstock.kernels.paged_attention import MaskRule, PagedBatch, paged_attention


@dataclass
class Case:
    """Random inputs; every cache slot that no request owns is NaN.

    Args:
        keys, values: of each row ``[S, KVH, D]`` and ``[S, KVH, DV]``, as attention reads them.
        scales: options of ``paged_attention`` with the scales of an int8 cache.
    """

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: PagedBatch
    keys: list[Tensor]
    values: list[Tensor]
    scales: dict[str, Any] = field(default_factory=dict)

    def attend(self, **options: Any) -> Tensor:
        """``paged_attention`` of all of it."""
        return paged_attention(self.query, self.key_cache, self.value_cache, self.batch, **self.scales, **options)

    def on(self, device: torch.device) -> Case:
        """Return the case with the kernel's arguments on ``device``."""
        old = self.batch
        table, slots = old.block_table.to(device), old.slot_mapping.to(device)
        ends = None if old.visible_ends is None else old.visible_ends.to(device)
        batch = PagedBatch(table, slots, old.query_lens, old.seq_lens, old.block_size, visible_ends=ends)
        caches = self.key_cache.to(device), self.value_cache.to(device)
        scales = {name: scales.to(device) for name, scales in self.scales.items()}
        query = self.query.to(device)
        return replace(self, query=query, key_cache=caches[0], value_cache=caches[1], batch=batch, scales=scales)


def make_case(
    rows: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    *,
    block_size: int = 7,
    cache_dtype: torch.dtype | None = None,
) -> Case:
    """``rows`` are the ``(query_len, seq_len)`` of each request, decodes first."""
    generator = torch.Generator().manual_seed(len(rows) * num_heads + key_dim)
    cache_dtype = dtype if cache_dtype is None else cache_dtype
    counts = [-(-seq_len // block_size) for _, seq_len in rows]
    num_blocks = sum(counts) + 3
    # No request owns block 0, which a kernel reads if it reads more keys than it looked up blocks for.
    shuffled = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    # Entries after a row's last block in the table are never read, so they are ids far outside the cache.
    table = torch.full((len(rows), max(counts) + 1), 10**6)
    shape = (num_blocks, block_size, num_kv_heads)
    key_cache, value_cache = (torch.full((*shape, dim), float("nan")).to(cache_dtype) for dim in (key_dim, value_dim))
    key_scales, value_scales = (
        torch.full((*shape, scales_per_head(dim)), float("nan"), dtype=torch.bfloat16) for dim in (key_dim, value_dim)
    )
    keys, values, slots = [], [], []
    for row, (query_len, seq_len) in enumerate(rows):
        blocks = [shuffled.pop() for _ in range(counts[row])]
        table[row, : counts[row]] = torch.tensor(blocks)
        own = torch.tensor([blocks[p // block_size] * block_size + p % block_size for p in range(seq_len)])
        for stored, cache, scales in ((keys, key_cache, key_scales), (values, value_cache, value_scales)):
            heads = torch.randn(seq_len, num_kv_heads, cache.shape[3], generator=generator)
            if cache_dtype == torch.int8:
                in_bytes, scales_of_heads = quantize_to_bytes(heads)
                _write(scales, own, scales_of_heads)
                _write(cache, own, in_bytes)
                stored.append(dequantize_bytes(in_bytes, scales_of_heads).to(dtype))
            else:
                stored.append(heads.to(cache_dtype))
                _write(cache, own, stored[-1])
        slots.append(own[-query_len:])
    query_lens, seq_lens = [q for q, _ in rows], [s for _, s in rows]
    # Heads first in memory, as transformers hands the query over.
    query = torch.randn(num_heads, sum(query_lens), key_dim, generator=generator).to(dtype).transpose(0, 1)
    batch = PagedBatch(table, torch.cat(slots), query_lens, seq_lens, block_size)
    scales = {"key_scale": key_scales, "value_scale": value_scales} if cache_dtype == torch.int8 else {}
    return Case(query, key_cache, value_cache, batch, keys, values, scales)


def _write(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Torch does not index float8 by a tensor on a CPU: its bytes are as good."""
    if cache.itemsize == 1:
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    cache.view(-1, *cache.shape[2:])[slots] = rows


def naive(
    case: Case,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask_rule: MaskRule | None = None,
    alibi_slopes: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """``[T, H, DV]`` in float64."""
    query = case.query.double()
    num_heads = query.shape[1]
    results = []
    for row, (query_len, seq_len) in enumerate(zip(case.batch.query_lens, case.batch.seq_lens, strict=True)):
        group_size = num_heads // case.keys[row].shape[1]
        keys = (case.keys[row].double() * key_scale).repeat_interleave(group_size, 1)
        values = (case.values[row].double() * value_scale).repeat_interleave(group_size, 1)
        for position in range(seq_len - query_len, seq_len):
            end = position + 1 if case.batch.visible_ends is None else int(case.batch.visible_ends[len(results)])
            visible = [p for p in range(end) if window is None or p > position - window]
            if mask_rule is not None:
                visible = [p for p in range(seq_len) if mask_rule(0, 0, torch.tensor(position), torch.tensor(p))]
            scores = torch.einsum("hd,phd->hp", query[len(results)], keys[visible]) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi_slopes is not None:
                scores += alibi_slopes.double()[:, None] * (torch.tensor(visible) - position)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
            weights = torch.softmax(scores, dim=1)[:, : len(visible)]
            results.append(torch.einsum("hp,phd->hd", weights, values[visible]))
    return torch.stack(results)
