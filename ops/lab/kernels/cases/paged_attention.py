"""Qwen3's heads: decode by batch size and context, prefill, and the costs of determinism and float8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .....kernels.paged_attention import PagedBatch, library, paged_attention, reference
from .....kernels.paged_attention.batch import Variant
from . import Case, Setting

_D = 128
_BLOCK_SIZE = 16
_SCALE = _D**-0.5
# Query tokens per piece of the truth, because scores in float64 take much memory.
_TRUTH_CHUNK = 512


def cases(setting: Setting) -> Iterator[Case]:
    """Yield the cases; Qwen3-8B has 32 query heads over 8, 0.6B has 16 over 8."""
    decodes = [(16, 1, 1024), (16, 64, 1024), (16, 256, 8192)]
    decodes += [(32, size, context) for context in (1024, 8192) for size in (1, 16, 64, 256)]
    for num_heads, size, context in setting.choose(on_gpu=decodes, on_cpu=[(16, 4, 256)]):
        yield _Rows.make(setting, num_heads, size, 1, context).case("decode")
    for num_heads, num_tokens in setting.choose(on_gpu=[(16, 8192), (32, 8192)], on_cpu=[(16, 128)]):
        yield _Rows.make(setting, num_heads, 1, num_tokens, num_tokens).case("prefill")
    for num_tokens, context in setting.choose(on_gpu=[(2048, 8192)], on_cpu=[(64, 256)]):
        yield _Rows.make(setting, 32, 1, num_tokens, context).case("later prefill")
    for size, query_len, context in setting.choose(
        on_gpu=[(1, 1, 8192), (64, 1, 8192), (1, 8192, 8192)], on_cpu=[(2, 1, 256)]
    ):
        rows = _Rows.make(setting, 32, size, query_len, context)
        yield rows.case("invariant decode" if query_len == 1 else "invariant prefill", is_batch_invariant=True)
    for size, context in setting.choose(on_gpu=[(64, 8192)], on_cpu=[(2, 256)]):
        yield _Rows.make(setting, 32, size, 1, context, cache_dtype=torch.float8_e4m3fn).case("float8 decode")


@dataclass(frozen=True)
class _Rows:
    """Requests of equal length with scattered blocks in a cache of 8 key/value heads."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: PagedBatch

    @classmethod
    def make(
        cls,
        setting: Setting,
        num_heads: int,
        size: int,
        query_len: int,
        context: int,
        cache_dtype: torch.dtype = torch.bfloat16,
    ) -> _Rows:
        num_blocks = size * context // _BLOCK_SIZE
        keys, values = (setting.random(num_blocks, _BLOCK_SIZE, 8, _D, dtype=cache_dtype) for _ in range(2))
        table = setting.distinct(num_blocks, num_blocks).view(size, -1)
        slots = table[..., None] * _BLOCK_SIZE + torch.arange(_BLOCK_SIZE, device=setting.device)
        own_slots = slots.view(size, context)[:, -query_len:].flatten()
        batch = PagedBatch(table, own_slots, [query_len] * size, [context] * size, _BLOCK_SIZE)
        # Twice as large, for sharper weights: the mean of thousands of values is near zero, as a wrong result may be.
        return cls(2 * setting.random(size * query_len, num_heads, _D), keys, values, batch)

    def case(self, name: str, *, is_batch_invariant: bool = False) -> Case:
        num_tokens, num_heads, _ = self.query.shape
        size, context = len(self.batch.seq_lens), self.batch.seq_lens[0]
        query_len = num_tokens // size
        num_pairs = size * (query_len * context - query_len * (query_len - 1) // 2)
        return Case(
            shape=f"{name} B={size} S={context} H={num_heads} KVH=8 D={_D}",
            dtype=self.key_cache.dtype,
            inputs=(self.query,),
            run=lambda query: paged_attention(
                query,
                self.key_cache,
                self.value_cache,
                self.batch,
                scale=_SCALE,
                is_batch_invariant=is_batch_invariant,
            ),
            truth=self._truth,
            rivals=self._rivals(),
            num_bytes=2 * self.query.nbytes + self.key_cache.nbytes + self.value_cache.nbytes,
            num_flop=4 * num_pairs * num_heads * _D,
        )

    def _truth(self, query: Tensor) -> Tensor:
        results: list[Tensor] = []
        for row, (query_len, seq_len) in enumerate(zip(self.batch.query_lens, self.batch.seq_lens, strict=True)):
            table, first = self.batch.block_table[row : row + 1], row * query_len
            for start in range(0, query_len, _TRUTH_CHUNK):
                stop = min(start + _TRUTH_CHUNK, query_len)
                lens = [stop - start], [seq_len - query_len + stop]
                batch = PagedBatch(table, self.batch.slot_mapping, *lens, _BLOCK_SIZE)
                chunk = query[first + start : first + stop]
                results.append(
                    reference.paged_attention(chunk, self.key_cache, self.value_cache, batch, Variant(_SCALE))
                )
        return torch.cat(results)

    def _rivals(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """Return torch's attention; for prompts also that of the libraries which an engine may choose."""
        batch, on_gpu = self.batch, self.query.device.type == "cuda"
        if self.key_cache.dtype != self.query.dtype:
            return {}
        # Torch's mask for fewer queries than keys begins at the first key.
        rivals = {"SDPA": self._contiguous()} if batch.has_whole_prompts or batch.num_decodes else {}
        if batch.num_decodes:
            return rivals
        inputs = self.key_cache, self.value_cache, batch, Variant(_SCALE)
        libraries = {name: library.LIBRARIES[name] for name in (library.installed() if on_gpu else ["flash"])}
        return rivals | {
            f"{name} from blocks": lambda query, attend=each.attend: attend(query, *inputs)
            for name, each in libraries.items()
            if each.supports(*inputs)
        }

    def _contiguous(self) -> _Contiguous:
        size, num_blocks = self.batch.block_table.shape
        keys, values = (
            cache[self.batch.block_table.long()]
            .view(size, num_blocks * _BLOCK_SIZE, 8, _D)
            .transpose(1, 2)
            .contiguous()
            for cache in (self.key_cache, self.value_cache)
        )
        return _Contiguous(keys, values)


@dataclass(frozen=True)
class _Contiguous:
    """Torch's attention over contiguous keys and values ``[B, KVH, S, D]``."""

    keys: Tensor
    values: Tensor

    def __call__(self, query: Tensor) -> Tensor:
        size, query_len = len(self.keys), len(query) // len(self.keys)
        heads = query.view(size, query_len, -1, _D).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            heads, self.keys, self.values, is_causal=query_len > 1, scale=_SCALE, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(query.shape)
