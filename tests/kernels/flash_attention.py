"""Stand-ins for the packages of FlashAttention, which need a GPU: their signatures, checks and results on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class StandIns:
    """Both packages, by their attributes.

    Args:
        num_calls: of either function.
        in_pages: whether FlashAttention 2 was to read pages, for each call.
        is_old: align the causal mask with the first key, as FlashAttention 2.0 did.
    """

    num_calls: int = 0
    in_pages: list[bool] = field(default_factory=list)
    is_old: bool = False

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        """Compute as FlashAttention 2 does, and refuse what it refuses."""
        assert (dropout_p, alibi_slopes, deterministic, return_attn_probs) == (0.0, None, False, False)
        assert (k.shape, q.shape[2] % 8) == (v.shape, 0)
        key_lens = cu_seqlens_k.diff().tolist()
        _check_starts(cu_seqlens_q, q, max_seqlen_q)
        assert (cu_seqlens_k.dtype, cu_seqlens_k[0].item(), max(key_lens)) == (torch.int32, 0, max_seqlen_k)
        self.in_pages.append(block_table is not None)
        if block_table is None:
            assert cu_seqlens_k[-1] == len(k)
            rows = list(zip(k.split(key_lens), v.split(key_lens), strict=True))
        else:
            assert k.shape[1] % 256 == 0
            rows = list(_rows_of_pages(k, v, block_table, key_lens))
        return self._attend(q, cu_seqlens_q, rows, softmax_scale, causal, window_size, softcap)

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        qv: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> Tensor:
        """Compute as FlashAttention 3 does over a cache in pages, and refuse what it refuses."""
        assert k is v is qv is rotary_cos is cache_batch_idx is cache_leftpad is cu_seqlens_k_new is None
        assert cu_seqlens_q is not None
        assert page_table is not None
        assert cache_seqlens is not None
        assert (cache_seqlens.dtype, cache_seqlens.stride(0), num_splits) == (torch.int32, 1, 1)
        assert len(cache_seqlens) == len(page_table) == len(cu_seqlens_q) - 1
        _check_starts(cu_seqlens_q, q, max_seqlen_q)
        rows = list(_rows_of_pages(k_cache, v_cache, page_table, cache_seqlens.tolist()))
        return self._attend(q, cu_seqlens_q, rows, softmax_scale, causal, window_size, softcap)

    def _attend(
        self,
        query: Tensor,
        starts: Tensor,
        rows: list[tuple[Tensor, Tensor]],
        scale: float | None,
        causal: bool,
        window: tuple[int, int],
        softcap: float,
    ) -> Tensor:
        if query.dtype not in (torch.bfloat16, torch.float16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        self.num_calls += 1
        results: list[Tensor] = []
        for queries, (keys, values) in zip(query.split(starts.diff().tolist()), rows, strict=True):
            group = query.shape[1] // keys.shape[1]
            keys, values = (each.float().repeat_interleave(group, 1) for each in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", queries.float(), keys) * (scale or query.shape[2] ** -0.5)
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            first = 0 if self.is_old else len(keys) - len(queries)
            distance = torch.arange(len(keys)) - (torch.arange(len(queries))[:, None] + first)
            left, right = window[0], 0 if causal else window[1]
            hidden = (distance > right) if right >= 0 else torch.zeros_like(distance, dtype=torch.bool)
            if left >= 0:
                hidden |= distance < -left
            weights = scores.masked_fill(hidden, float("-inf")).softmax(2).nan_to_num()
            results.append(torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype))
        return torch.cat(results)


def _check_starts(starts: Tensor, query: Tensor, max_len: int | None) -> None:
    assert (starts.dtype, starts[0].item(), starts[-1].item()) == (torch.int32, 0, len(query))
    assert (starts.stride(0), starts.diff().max(), query.stride(2)) == (1, max_len, 1)


def _rows_of_pages(keys: Tensor, values: Tensor, table: Tensor, lens: list[int]) -> Iterator[tuple[Any, ...]]:
    assert (table.dtype, table.stride(1)) == (torch.int32, 1)
    size = keys.shape[1]
    for blocks, length in zip(table, lens, strict=True):
        own = blocks[: -(-length // size)]
        yield tuple(cache[own].flatten(0, 1)[:length] for cache in (keys, values))
