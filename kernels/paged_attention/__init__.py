"""Attention of packed queries over the paged KV cache."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import REFERENCE, select
from ..errors import KernelInputError
from . import invariant, native, reference
from .batch import MaskRule, PagedBatch

__all__ = ["MaskRule", "PagedBatch", "paged_attention"]

_IMPLEMENTATIONS = {REFERENCE: reference.paged_attention, "cpu": native.paged_attention}
_INVARIANT_IMPLEMENTATIONS = {REFERENCE: invariant.paged_attention}


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask_rule: MaskRule | None = None,
    is_batch_invariant: bool = False,
) -> Tensor:
    """Attend each query token to the cached tokens of its own request, prefill chunks and decodes mixed.

    This step's keys and values are already in the cache. The query token at position ``p`` sees positions
    ``max(0, p - window + 1) .. p``, or those that ``mask_rule`` allows. Query head ``h`` reads key/value head
    ``h // (H // KVH)``. Softmax is in float32, products in the dtype of ``query``.

    Args:
        query: ``[T, H, D]``, any strides; rows as ``batch`` says.
        key_cache: ``[NB, BS, KVH, D]``, contiguous, dtype of ``query``; ``KVH`` divides ``H``.
        value_cache: ``[NB, BS, KVH, DV]``, contiguous, dtype of ``query``.
        batch: which tokens belong to which request, and where their blocks are.
        scale: factor on the scores, usually ``D ** -0.5``.
        window: positions a token sees, itself included; None sees all before it.
        softcap: scores become ``softcap * tanh(score / softcap)``, before the mask.
        sinks: ``[H]`` logits that take part in the softmax and carry no value.
        mask_rule: replaces causality and ``window``: ``rule(0, 0, query_positions, key_positions)``, two
            broadcastable integer tensors, is True where the query may see the key.
        is_batch_invariant: a token's result has the same bits in every batch of ``T`` tokens, whatever the others are
            and however its request is cut up; slower.

    Returns:
        ``[T, H, DV]`` in the dtype of ``query``. Only slots of a request's own tokens are read for it, so what
        lies in the others (even NaN) does not matter.

    Raises:
        KernelInputError: a shape or dtype above does not hold.

    Cost: decode is memory bound, ``B * seq_len * KVH * (D + DV) * itemsize`` bytes read.
    Source: Kwon et al. 2023 (arXiv:2309.06180), section 4.
    """
    _check_inputs(query, key_cache, value_cache, batch)
    implementations = _INVARIANT_IMPLEMENTATIONS if is_batch_invariant else _IMPLEMENTATIONS
    return select(implementations, query.device, query.dtype)(
        query, key_cache, value_cache, batch, scale, window, softcap, sinks, mask_rule
    )


def _check_inputs(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch) -> None:
    if query.ndim != 3:
        raise KernelInputError(f"query must be [T, H, D], got shape {tuple(query.shape)}")
    num_tokens, num_heads, head_dim = query.shape
    if num_tokens != batch.num_tokens:
        raise KernelInputError(f"query must have {batch.num_tokens} tokens, got {num_tokens}")
    if key_cache.ndim != 4 or key_cache.shape[3] != head_dim or num_heads % key_cache.shape[2] != 0:
        raise KernelInputError(
            f"key_cache must be [NB, BS, KVH, {head_dim}] with KVH dividing {num_heads}, got {tuple(key_cache.shape)}"
        )
    if value_cache.shape[:3] != key_cache.shape[:3]:
        raise KernelInputError(
            f"value_cache must begin as key_cache {tuple(key_cache.shape)}: {tuple(value_cache.shape)}"
        )
    if key_cache.shape[1] != batch.block_size:
        raise KernelInputError(f"the cache has blocks of {key_cache.shape[1]} tokens, the batch of {batch.block_size}")
    if not query.dtype == key_cache.dtype == value_cache.dtype:
        raise KernelInputError(
            f"query and caches must share a dtype, got {query.dtype}, {key_cache.dtype}, {value_cache.dtype}"
        )
