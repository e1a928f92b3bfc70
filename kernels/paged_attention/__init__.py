"""Attention of packed queries over the paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import AUTO, NATIVE, REFERENCE, KernelInputError, OnGpu, select
from ..kv_cache import EIGHT_BIT_DTYPES, check_scale
from . import invariant, library, native, reference
from .batch import DeviceRows, MaskRule, PagedBatch, Variant

__all__ = ["DeviceRows", "MaskRule", "PagedBatch", "backend_of", "is_capturable", "paged_attention"]

_IMPLEMENTATIONS = {
    REFERENCE: reference.paged_attention,
    "cpu": native.paged_attention,
    "cuda": OnGpu(f"{__package__}.gpu", "paged_attention"),
}
_INVARIANT_IMPLEMENTATIONS = {
    REFERENCE: invariant.paged_attention,
    "cpu": native.invariant_paged_attention,
    "cuda": OnGpu(f"{__package__}.gpu", "invariant_paged_attention"),
}


def backend_of(
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    head_dims: tuple[int, int],
    *,
    backend: str = AUTO,
    is_batch_invariant: bool = False,
) -> str:
    """Return the one of ``dispatch.BACKENDS`` that runs: ``backend`` if it can, else the reference.

    Args:
        dtype, cache_dtype: dtypes of queries and of caches.
        head_dims: ``(D, DV)``.
    """
    implementations = _INVARIANT_IMPLEMENTATIONS if is_batch_invariant else _IMPLEMENTATIONS
    chosen = select(implementations, device, dtype, backend)
    if chosen is implementations[REFERENCE]:
        return REFERENCE
    if chosen in (native.paged_attention, native.invariant_paged_attention):
        return NATIVE if native.has_loop(dtype, cache_dtype, *head_dims) else REFERENCE
    return "triton"


def is_capturable(device: torch.device, dtype: torch.dtype, backend: str = AUTO) -> bool:
    """Return whether a CUDA graph can capture a ``captured_decode``. The reference reads lengths on the host."""
    return device.type == "cuda" and select(_IMPLEMENTATIONS, device, dtype, backend) is not reference.paged_attention


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
    alibi_slopes: Tensor | None = None,
    mask_rule: MaskRule | None = None,
    key_scale: float | Tensor = 1.0,
    value_scale: float | Tensor = 1.0,
    is_batch_invariant: bool = False,
    backend: str = AUTO,
    prompt_library: str | None = None,
) -> Tensor:
    """Attend each query token to the cached tokens of its request; a batch may mix prefill chunks and decodes.

    This step's keys and values are already in the cache. The query token at position ``p`` sees positions
    ``max(0, p - window + 1) .. p``, or up to its end in ``batch.visible_ends`` if the batch has them, or those that
    ``mask_rule`` allows. Query head ``h`` reads key/value head ``h // (H // KVH)``. Softmax is in float32, products are
    in the dtype of ``query``.

    Args:
        query: ``[T, H, D]``, any strides; rows as ``batch`` says.
        key_cache: ``[NB, BS, KVH, D]``, contiguous, dtype of ``query``, float8 of either kind, or int8; ``KVH``
            divides ``H``.
        value_cache: ``[NB, BS, KVH, DV]``, contiguous, dtype of ``key_cache``.
        batch: the requests of the tokens, and their blocks.
        scale: factor on the scores, usually ``D ** -0.5``.
        window: number of positions that a token sees, including its own; None for all before it.
        softcap: scores become ``softcap * tanh(score / softcap)``, before the mask.
        sinks: ``[H]`` logits that take part in the softmax without a value.
        alibi_slopes: ``[H]`` float32; ``slope * (key position - query position)`` is added to a score, after the cap.
        mask_rule: replaces causality and ``window``: ``rule(0, 0, query_positions, key_positions)``, two
            broadcastable integer tensors, is True where the query may see the key.
        key_scale, value_scale: factor on the numbers of a float8 cache; the scales of an int8 cache, as
            ``store_kv_cache`` writes them.
        is_batch_invariant: compute a token with the same bits in every batch of ``T`` tokens, whatever the other tokens
            are and however its request is cut into chunks; slower. Kernels have this property for any ``T``, the
            reference only for equal ``T``.
        backend: ``AUTO``, or one of ``dispatch.BACKENDS`` to use if it supports the arguments.
        prompt_library: one of ``library.LIBRARIES`` to use instead where it suits; None for none.

    Returns:
        ``[T, H, DV]`` in the dtype of ``query``. Only slots of a request's own tokens are read for it, so the contents
        of other slots do not matter, even if they are NaN.

    Raises:
        KernelInputError: a shape or dtype above does not hold.

    Cost: decode is memory bound, ``B * seq_len * KVH * (D + DV) * itemsize`` bytes read. A prefill of
    ``T`` tokens from position 0 does ``T * (T + 1) * H * (D + DV)`` FLOP.
    Source: Kwon et al. 2023 (arXiv:2309.06180), section 4.
    """
    _check_inputs(query, key_cache, value_cache, batch)
    variant = Variant(scale, window, softcap, sinks, alibi_slopes, mask_rule, key_scale, value_scale)
    _check_variant(variant, query.shape[1], key_cache, value_cache)
    inputs = query, key_cache, value_cache, batch, variant
    if prompt_library is not None and not is_batch_invariant and library.suits(*inputs, prompt_library):
        return library.LIBRARIES[prompt_library].attend(*inputs)
    implementations = _INVARIANT_IMPLEMENTATIONS if is_batch_invariant else _IMPLEMENTATIONS
    return select(implementations, query.device, query.dtype, backend)(*inputs)


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
            f"value_cache must be {tuple(key_cache.shape[:3])} in its first axes, got {tuple(value_cache.shape)}"
        )
    if key_cache.shape[1] != batch.block_size:
        raise KernelInputError(f"the cache has blocks of {key_cache.shape[1]} tokens, the batch of {batch.block_size}")
    if key_cache.dtype not in (query.dtype, *EIGHT_BIT_DTYPES) or value_cache.dtype != key_cache.dtype:
        raise KernelInputError(
            f"caches must both have the dtype of the query, {query.dtype}, or both one of {EIGHT_BIT_DTYPES}, "
            f"got {key_cache.dtype} and {value_cache.dtype}"
        )
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()):
        raise KernelInputError("key_cache and value_cache must be contiguous")


def _check_variant(variant: Variant, num_heads: int, key_cache: Tensor, value_cache: Tensor) -> None:
    check_scale("key_scale", variant.key_scale, key_cache)
    check_scale("value_scale", variant.value_scale, value_cache)
    for name, per_head in (("sinks", variant.sinks), ("alibi_slopes", variant.alibi_slopes)):
        if per_head is not None and (per_head.shape != (num_heads,) or not per_head.is_contiguous()):
            raise KernelInputError(f"{name} must be [{num_heads}] and contiguous, got {tuple(per_head.shape)}")
    if variant.window is not None and variant.window < 1:
        raise KernelInputError(f"window must be at least 1, got {variant.window}")
