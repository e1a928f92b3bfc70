"""Triton kernels for the GPU: split-KV for decode rows, and one launch over packed rows for all others.

Limits: ``D`` and ``DV`` up to 1024 (they are padded to powers of two, at least 16); any block size, of which powers of
two are fastest; at most 65535 rows. The reference computes attention with a ``mask_rule``, a Python callable that
kernels cannot call. It also computes the prompts of a step with ``visible_ends``, in which tokens see later ones: steps
with images.

Decode with a CUDA graph: build the batch once with ``PagedBatch.captured_decode`` from static tensors, and capture the
forward. Before each replay write block tables, slots, lengths and tokens into these tensors. Unused rows have a length
of 0; nothing is read for them, and their results are zeros. The grid and the number of splits depend on the size of
that batch and on its ``max_seq_len``. Nothing is read back, and memory comes from the graph's own pool.

Batch invariance: every row uses tiles of one layout, and keys are split at multiples of ``INVARIANT_SPLIT_LEN``
positions. Within a part, tiles of keys are processed in ascending order. ``reduce_kernel``, or ``varlen_kernel`` in
registers, folds the parts in ascending order with the same function. Multiplications and additions are not fused,
because the compiler would decide that for each kernel separately.
"""

# Pyright does not know the arguments of `kernel[grid]`.
# pyright: reportCallIssue=false

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch import warn_once
from . import gpu_config, invariant, reference
from .batch import PagedBatch, Variant
from .gpu_config import Tile
from .gpu_decode import decode_kernel
from .gpu_reduce import reduce_kernel
from .gpu_varlen import varlen_kernel

_LOG2E = 1.4426950408889634
# Splits that are loaded together when they are reduced.
_REDUCE_UNROLL = 16


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, variant: Variant
) -> Tensor:
    """See ``paged_attention.paged_attention``."""
    if variant.mask_rule is not None:
        warn_once("attention with a custom mask rule has no kernel: the reference runs instead")
        return reference.paged_attention(query, key_cache, value_cache, batch, variant)
    launch = _Launch(query, key_cache, value_cache, batch, variant, 0)
    sizes = launch.group_size, launch.dim, query.itemsize, key_cache.itemsize
    if batch.num_decodes or batch.has_device_decodes:
        launch.split_decodes(gpu_config.decode_tile(*sizes))
    if batch.visible_ends is not None:
        reference.attend_prefill_rows(query, key_cache, value_cache, batch, variant, launch.out)
    elif batch.num_decodes < len(batch.query_lens):
        max_query_len = batch.device_rows.max_query_len
        tile = gpu_config.varlen_tile(*sizes, max_query_len)
        launch.attend_rows(tile, batch.num_decodes)
    return launch.out


def invariant_paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, variant: Variant
) -> Tensor:
    """See ``paged_attention.paged_attention``."""
    if variant.mask_rule is not None:
        warn_once("batch-invariant attention with a custom mask rule has no kernel: plain torch runs instead")
        return invariant.paged_attention(query, key_cache, value_cache, batch, variant)
    if batch.visible_ends is not None:
        return invariant.paged_attention(query, key_cache, value_cache, batch, variant)
    launch = _Launch(query, key_cache, value_cache, batch, variant, gpu_config.INVARIANT_SPLIT_LEN)
    tile = gpu_config.invariant_tile(launch.group_size, launch.dim, query.itemsize)
    num_programs = launch.num_programs(tile, batch.num_decodes)
    num_split_rows = 0
    if num_programs and not gpu_config.fills_device(num_programs, gpu_config.sm_count(query.device)):
        num_split_rows = batch.num_decodes
        launch.split_decodes(tile)
    if num_split_rows < len(batch.query_lens):
        launch.attend_rows(tile, num_split_rows)
    return launch.out


class _Launch:
    """Arguments shared by the kernels of one call.

    Args:
        split_len: split keys at its multiples; 0 to choose splits for the device.
    """

    def __init__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: PagedBatch,
        variant: Variant,
        split_len: int,
    ) -> None:
        num_tokens, self.num_heads, head_dim = query.shape
        _, block_size, num_kv_heads, value_dim = value_cache.shape
        self.group_size = self.num_heads // num_kv_heads
        self.dim = max(gpu_config.padded(head_dim), gpu_config.padded(value_dim))
        # Some tokens of such a batch may belong to no row.
        new = torch.zeros if batch.has_device_decodes else torch.empty
        self.out = new(num_tokens, self.num_heads, value_dim, dtype=query.dtype, device=query.device)
        self._query, self._batch, self._variant = query, batch, variant
        self._caches = (key_cache, value_cache, *variant.cache_scales)
        self._split_len = split_len
        self._table = batch.block_table if batch.block_table.stride(1) == 1 else batch.block_table.contiguous()
        key_factor, self._value_factor = variant.cache_factors
        factor = variant.scale * key_factor * _LOG2E
        softcap = variant.softcap
        self._scoring = (factor, 1.0) if softcap is None else (2 * factor / softcap, softcap * _LOG2E)
        self._reach = variant.window or 0
        self._shape = {
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": self.group_size,
            "HEAD_DIM": head_dim,
            "VALUE_DIM": value_dim,
            "BLOCK_SIZE": block_size,
            "BLOCK_D": gpu_config.padded(head_dim),
            "BLOCK_DV": gpu_config.padded(value_dim),
            "HAS_WINDOW": variant.window is not None,
            "HAS_SOFTCAP": softcap is not None,
        }

    def num_programs(self, tile: Tile, num_rows: int) -> int:
        """Return the number of programs for ``num_rows`` rows of one query block each."""
        return num_rows * self._shape["NUM_KV_HEADS"] * -(-self.group_size // tile.heads)

    def attend_rows(self, tile: Tile, first_row: int) -> None:
        """Compute the rows from ``first_row`` on without splitting their keys; rows before it are decodes."""
        batch, variant = self._batch, self._variant
        num_rows = len(batch.query_lens) - first_row
        num_blocks = (batch.num_tokens - first_row) // (tile.block_m // tile.heads) + num_rows
        varlen_kernel[(num_blocks, self.num_programs(tile, 1))](
            self.out, self._query, *self._caches,
            self._table, batch.device_rows.query_starts, batch.device_rows.seq_lens,
            variant.sinks, variant.alibi_slopes, *self._query.stride(), self._table.stride(0), self._reach,
            first_row, len(batch.query_lens), *self._scoring, self._value_factor,
            SKIPS_DECODES=batch.has_device_decodes and self._split_len == 0,
            **self._options(tile),
        )  # fmt: skip

    def split_decodes(self, tile: Tile) -> None:
        """Compute the decode rows, with their keys split among programs."""
        batch, variant = self._batch, self._variant
        num_rows, seq_lens = batch.num_decodes, batch.device_rows.seq_lens
        if batch.device_rows.decode_lens is not None:
            num_rows, seq_lens = len(batch.query_lens), batch.device_rows.decode_lens
        num_splits = self._num_splits(tile, num_rows)
        is_whole = num_splits == 1
        parts = (self.out,) * 3
        if not is_whole:
            shape = (num_rows, self.num_heads, num_splits)
            new = partial(torch.empty, dtype=torch.float32, device=self.out.device)
            parts = (new(shape), new(shape), new(*shape, self.out.shape[2]))
        options = self._options(tile)
        decode_kernel[(self.num_programs(tile, 1), num_splits, num_rows)](
            self.out, *parts, self._query, *self._caches, self._table, seq_lens,
            variant.sinks, variant.alibi_slopes, *self._query.stride(), self._table.stride(0), self._reach,
            num_splits, *self._scoring, self._value_factor,
            IS_WHOLE=is_whole,
            **options,
        )  # fmt: skip
        if not is_whole:
            shared = ("VALUE_DIM", "BLOCK_N", "BLOCK_DV", "SPLIT_LEN", "HAS_WINDOW", "enable_fp_fusion")
            reduce_kernel[(self.num_heads, num_rows)](
                self.out, *parts, seq_lens, variant.sinks, self._reach, num_splits, self._value_factor,
                UNROLL=_REDUCE_UNROLL,
                num_warps=1,
                **{name: options[name] for name in shared},
            )  # fmt: skip

    def _num_splits(self, tile: Tile, num_rows: int) -> int:
        window, max_seq_len = self._variant.window, self._batch.device_rows.max_seq_len
        max_keys = max_seq_len if window is None else min(window, max_seq_len)
        if self._split_len == 0:
            num_sms = gpu_config.sm_count(self.out.device)
            return gpu_config.num_splits(self.num_programs(tile, num_rows), max_keys, num_sms)
        # A window that begins in the middle of a split covers one more.
        num_all, num_in_window = -(-max_seq_len // self._split_len), -(-(max_keys - 1) // self._split_len) + 1
        return max(1, min(num_all, num_in_window))

    def _options(self, tile: Tile) -> dict[str, Any]:
        return {
            **self._shape,
            "HEADS": tile.heads,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "SPLIT_LEN": self._split_len,
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
            "enable_fp_fusion": self._split_len == 0,
        }
