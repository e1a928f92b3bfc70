"""In Triton, for the GPU: decode rows through split-KV, all others through one launch over packed rows.

Limits: ``D`` and ``DV`` up to 1024 (they are padded to powers of two, at least 16); any block size, powers of two are
fastest; at most 65535 rows. A ``mask_rule`` is a Python callable, which no kernel can call: the reference runs for it.
It also computes the prompts of a step in which tokens see what follows them (``visible_ends``): steps with images.

A decode under a CUDA graph: make the batch once by ``PagedBatch.captured_decode`` from static tensors, capture the
forward with it, and before each replay write block tables, slots, lengths and tokens into those tensors, with a length
of 0 for rows that are not in use: they read nothing and give zeros. Grid and number of splits follow from the
size of that batch and from its ``max_seq_len``; nothing is read back, and memory comes from the graph's own pool.

Batch-invariant: every row goes through tiles of one layout, and keys are cut at multiples of
``INVARIANT_SPLIT_LEN`` positions. Within such a part tiles of keys are taken in ascending order, and the parts are
folded one after the other, by ``reduce_kernel`` or in ``varlen_kernel``'s registers, in the same order by the same
function. Multiplications and additions are not contracted, as that is the compiler's choice for each kernel.
"""

# Pyright does not know what `kernel[grid]` takes.
# pyright: reportCallIssue=false

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch import tell_once
from . import gpu_config, invariant, reference
from .batch import PagedBatch
from .gpu_config import Tile
from .gpu_decode import decode_kernel
from .gpu_reduce import reduce_kernel
from .gpu_varlen import varlen_kernel
from .variant import Variant

_LOG2E = 1.4426950408889634
# Splits that are loaded together when they are joined.
_REDUCE_UNROLL = 16


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, variant: Variant
) -> Tensor:
    """See ``paged_attention.paged_attention``."""
    if variant.mask_rule is not None:
        tell_once("attention with a mask rule of the model's own has no kernel: the reference runs instead")
        return reference.paged_attention(query, key_cache, value_cache, batch, variant)
    launch = _Launch(query, key_cache, value_cache, batch, variant, 0)
    sizes = launch.group_size, launch.dim, query.itemsize, key_cache.itemsize
    if batch.num_decodes or batch.finds_decodes:
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
        tell_once(
            "batch-invariant attention with a mask rule of the model's own has no kernel: plain torch runs instead"
        )
        return invariant.paged_attention(query, key_cache, value_cache, batch, variant)
    if batch.visible_ends is not None:
        return invariant.paged_attention(query, key_cache, value_cache, batch, variant)
    launch = _Launch(query, key_cache, value_cache, batch, variant, gpu_config.INVARIANT_SPLIT_LEN)
    tile = gpu_config.invariant_tile(launch.group_size, launch.dim, query.itemsize)
    num_programs = launch.num_programs(tile, batch.num_decodes)
    num_split = 0
    if num_programs and not gpu_config.fills_device(num_programs, gpu_config.sm_count(query.device)):
        num_split = batch.num_decodes
        launch.split_decodes(tile)
    if num_split < len(batch.query_lens):
        launch.attend_rows(tile, num_split)
    return launch.out


class _Launch:
    """The arguments that the kernels of one call share.

    Args:
        split_len: keys are cut at its multiples; 0 cuts them as suits the device.
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
        (num_tokens, self.num_heads, head_dim), (_, block_size, num_kv_heads, value_dim) = (
            query.shape,
            value_cache.shape,
        )
        self.group_size = self.num_heads // num_kv_heads
        self.dim = max(gpu_config.padded(head_dim), gpu_config.padded(value_dim))
        # There some tokens may be of no row.
        new = torch.zeros if batch.finds_decodes else torch.empty
        self.out = new(num_tokens, self.num_heads, value_dim, dtype=query.dtype, device=query.device)
        self._query, self._caches, self._batch, self._variant = query, (key_cache, value_cache), batch, variant
        self._split_len = split_len
        self._table = batch.block_table if batch.block_table.stride(1) == 1 else batch.block_table.contiguous()
        factor = variant.scale * variant.key_scale * _LOG2E
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
        """Programs of ``num_rows`` rows of one block each."""
        return num_rows * self._shape["NUM_KV_HEADS"] * -(-self.group_size // tile.heads)

    def attend_rows(self, tile: Tile, first_row: int) -> None:
        """The rows from ``first_row`` on, whose keys are not split among programs; rows before it are decodes."""
        batch, variant = self._batch, self._variant
        num_rows = len(batch.query_lens) - first_row
        num_blocks = (batch.num_tokens - first_row) // (tile.block_m // tile.heads) + num_rows
        varlen_kernel[(num_blocks, self.num_programs(tile, 1))](
            *(self.out, self._query, *self._caches),
            *(self._table, batch.device_rows.query_starts, batch.device_rows.seq_lens),
            *(variant.sinks, variant.alibi_slopes, *self._query.stride(), self._table.stride(0), self._reach),
            *(first_row, len(batch.query_lens), *self._scoring, variant.value_scale),
            SKIPS_DECODES=batch.finds_decodes and self._split_len == 0,
            **self._options(tile),
        )

    def split_decodes(self, tile: Tile) -> None:
        """The decode rows, their keys split among programs."""
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
            *(self.out, *parts, self._query, *self._caches, self._table, seq_lens),
            *(variant.sinks, variant.alibi_slopes, *self._query.stride(), self._table.stride(0), self._reach),
            *(num_splits, *self._scoring, variant.value_scale),
            IS_WHOLE=is_whole,
            **options,
        )
        if not is_whole:
            kept = ("VALUE_DIM", "BLOCK_N", "BLOCK_DV", "SPLIT_LEN", "HAS_WINDOW", "enable_fp_fusion")
            reduce_kernel[(self.num_heads, num_rows)](
                *(self.out, *parts, seq_lens, variant.sinks, self._reach, num_splits, variant.value_scale),
                UNROLL=_REDUCE_UNROLL,
                num_warps=1,
                **{name: options[name] for name in kept},
            )

    def _num_splits(self, tile: Tile, num_rows: int) -> int:
        window, max_seq_len = self._variant.window, self._batch.device_rows.max_seq_len
        max_keys = max_seq_len if window is None else min(window, max_seq_len)
        if self._split_len == 0:
            num_sms = gpu_config.sm_count(self.out.device)
            return gpu_config.num_splits(self.num_programs(tile, num_rows), max_keys, num_sms)
        # A window that begins in the middle of a split ends in one more.
        all_keys, own_keys = -(-max_seq_len // self._split_len), -(-(max_keys - 1) // self._split_len) + 1
        return max(1, min(all_keys, own_keys))

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
