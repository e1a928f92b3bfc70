"""Attention of long prompts by libraries, of which one may be chosen when a model is loaded.

FlashInfer is not among them: it compiles a kernel for each shape with nvcc at its first call (ops/lab/reports/gpu.md).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .batch import PagedBatch, Variant
from .flash_attention import FlashAttention2, FlashAttention3, copied

# Mean tokens of a prompt from which on the copies and a launch for each prompt are worth it.
MIN_PROMPT_LEN = 512


class Library(Protocol):
    """Attention of long prompts by a library. It may be absent or refuse a shape; then ``attend`` raises.

    Attributes:
        package: module that a program imports to use it.
    """

    package: str

    def supports(self, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, variant: Variant) -> bool:
        """Return whether it computes the prompts of ``batch`` with the window and cap of ``variant``."""
        ...

    def attend(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, variant: Variant
    ) -> Tensor:
        """See ``paged_attention.paged_attention``, for arguments that it supports."""
        ...


class TorchLibrary:
    """A library within torch: whole prompts with plain scores, one after the other, of copied keys and values."""

    package = "torch"

    def __init__(self, backend: SDPBackend) -> None:
        self._backend = backend

    def supports(self, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, variant: Variant) -> bool:
        """See ``Library``."""
        has_window = variant.window is not None and variant.window < max(batch.seq_lens)
        has_plain_scores = variant.softcap is None and not has_window
        return has_plain_scores and batch.has_whole_prompts and key_cache.shape == value_cache.shape

    def attend(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, variant: Variant
    ) -> Tensor:
        """See ``Library``."""
        results: list[Tensor] = []
        packed = (query, copied(key_cache, batch), copied(value_cache, batch))
        with sdpa_kernel(self._backend):
            for parts in zip(*(each.split(batch.query_lens) for each in packed), strict=True):
                queries, keys, values = (part.transpose(0, 1)[None] for part in parts)
                out = F.scaled_dot_product_attention(
                    queries, keys, values, is_causal=True, scale=variant.scale, enable_gqa=True
                )
                results.append(out[0].transpose(0, 1))
        return torch.cat(results)


LIBRARIES: dict[str, Library] = {
    "flash": TorchLibrary(SDPBackend.FLASH_ATTENTION),
    "cuDNN": TorchLibrary(SDPBackend.CUDNN_ATTENTION),
    "FlashAttention 2": FlashAttention2(),
    "FlashAttention 3": FlashAttention3(),
}


def installed() -> list[str]:
    """Return the ``LIBRARIES`` whose packages are installed, without importing them."""
    return [name for name, library in LIBRARIES.items() if find_spec(library.package) is not None]


def suits(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, variant: Variant, library: str
) -> bool:
    """Return whether ``library`` gives the result of ``paged_attention``: for long prompts alone whose lengths are
    known on the host, with causal attention and keys in the dtype of the query.
    """
    if batch.num_decodes or batch.has_device_decodes or batch.visible_ends is not None:
        return False
    if batch.num_tokens < MIN_PROMPT_LEN * len(batch.query_lens) or key_cache.dtype != query.dtype:
        return False
    if variant.sinks is not None or variant.alibi_slopes is not None or variant.mask_rule is not None:
        return False
    return LIBRARIES[library].supports(key_cache, value_cache, batch, variant)
