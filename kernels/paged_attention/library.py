"""Attention of whole prompts by torch's libraries, over keys and values that are copied out of their blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .batch import PagedBatch, Variant

LIBRARIES = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
# Mean tokens of a prompt from which on the copies and a launch for each prompt are worth it.
MIN_PROMPT_LEN = 512


def suits(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, variant: Variant) -> bool:
    """Return whether a library gives the result of ``paged_attention``: for long prompts alone, each from its first
    token on, whose lengths are known on the host, with plain causal attention.
    """
    if batch.num_decodes or batch.has_device_decodes or batch.visible_ends is not None:
        return False
    if batch.query_lens != batch.seq_lens or batch.num_tokens < MIN_PROMPT_LEN * len(batch.query_lens):
        return False
    has_window = variant.window is not None and variant.window < max(batch.seq_lens)
    is_plain = variant.has_plain_scores and variant.mask_rule is None and not has_window
    return is_plain and key_cache.dtype == query.dtype and key_cache.shape == value_cache.shape


def attend(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, variant: Variant, library: str
) -> Tensor:
    """See ``paged_attention.paged_attention``, for arguments that ``suits``.

    Args:
        library: one of ``LIBRARIES``.
    """
    results: list[Tensor] = []
    with sdpa_kernel(LIBRARIES[library]):
        for row, heads in enumerate(query.split(batch.query_lens)):
            num_tokens = len(heads)
            blocks = batch.block_table[row, : -(-num_tokens // batch.block_size)].long()
            keys, values = (cache[blocks].flatten(0, 1)[:num_tokens] for cache in (key_cache, value_cache))
            queries, keys, values = (part.transpose(0, 1)[None] for part in (heads, keys, values))
            out = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=variant.scale, enable_gqa=True
            )
            results.append(out[0].transpose(0, 1))
    return torch.cat(results)
