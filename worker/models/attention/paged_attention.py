"""Our paged attention instead of a transformers model's own.

transformers lets a model's attention and its mask be replaced by name. We register one name per loaded model, bound to
a ``PagedAttention`` that the runner owns, so the step's metadata is stored in that object and not in a global. The mask
function returns the *rule* (which key positions a query position attends to) instead of a tensor. So each layer's exact
causal, sliding or chunked rule reaches the kernel, and no tensor of size T x T is created.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.dispatch import AUTO
from ....kernels.paged_attention import MaskRule, PagedBatch
from ....shared.errors import ModelLoadError
from .call import AttentionCall, CacheFormat
from .registry import register_attention

_NAME_NUMBERS = itertools.count()
_PROBED_QUERIES = 9
# Tensors that a model may pass to its attention: those that we use, and those that add no information. Any other may
# decide which keys count, as the blocks chosen by a sparse attention do.
_KNOWN_INPUTS = frozenset(("s_aux", "position_ids", "cache_position"))


class PagedAttention:
    """The attention of one model. Call ``record`` with a forward first, then ``allocate``, then ``begin`` for every
    step.

    Args:
        is_batch_invariant: use the batch-invariant kernel.
        backend: see ``forward.ForwardSettings``.
    """

    def __init__(self, *, is_batch_invariant: bool = False, backend: str = AUTO) -> None:
        self.name = f"penstock_paged_{next(_NAME_NUMBERS)}"
        self._is_batch_invariant = is_batch_invariant
        self._backend = backend
        self.calls: list[AttentionCall] = []
        self._batch: PagedBatch | None = None
        self._next_call = 0
        register_attention(self.name, self._attend_paged, _return_rule)

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes of one token in all layers."""
        return sum(call.bytes_per_token for call in self.calls)

    def record(self, run_forward: Callable[[], Any], max_model_len: int) -> None:
        """Run a forward of any few tokens to learn the model's attention calls. Their cache formats are retained.

        Raises:
            ModelLoadError: a layer needs something that paged attention does not support.
        """
        formats = [call.cache_format for call in self.calls]
        self.calls = []
        register_attention(self.name, lambda *args, **kwargs: self._record(max_model_len, *args, **kwargs))
        try:
            run_forward()
        finally:
            register_attention(self.name, self._attend_paged)
        for call, cache_format in zip(self.calls, formats, strict=False):  # empty the first time
            call.cache_format = cache_format

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        """Allocate the caches of all calls."""
        for call in self.calls:
            call.allocate(num_blocks, block_size, device)

    def begin(self, batch: PagedBatch) -> None:
        """Set the batch of the next forward."""
        self._batch = batch
        self._next_call = 0

    def _record(
        self,
        max_model_len: int,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: MaskRule | Tensor | None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        layer = type(module).__name__
        if position_bias is not None:
            raise ModelLoadError(f"{layer} adds a position bias to its scores, which is not supported")
        tensors = {name for name, value in kwargs.items() if isinstance(value, Tensor)}
        unknown = sorted(tensors - _KNOWN_INPUTS)
        if unknown:
            raise ModelLoadError(f"{layer} hands its attention {', '.join(unknown)}, which is not supported")
        if isinstance(attention_mask, Tensor):
            raise ModelLoadError(f"{layer} builds its attention mask itself, which is not supported")
        window, has_own_rule = _classify(attention_mask, max_model_len, query.device)
        (_, num_kv_heads, _, head_dim), value_dim = key.shape, value.shape[3]
        shapes = (num_kv_heads, head_dim), (value.shape[1], value_dim)
        self.calls.append(AttentionCall(module, *shapes, key.dtype, window, has_own_rule, CacheFormat(key.dtype)))
        return query.new_zeros(*query.shape[:1], query.shape[2], query.shape[1], value_dim), None

    def _attend_paged(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: MaskRule | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attend as transformers' attention functions do: ``[B, H, T, D]`` in, ``([B, T, H, DV], None)`` out.

        Either ``B`` or ``T`` is 1, so the packed ``[B * T, H, D]`` is a view.
        """
        call = self.calls[self._next_call]
        if call.module is not module or self._batch is None:
            raise RuntimeError(f"{type(module).__name__} made attention {self._next_call} out of its recorded order")
        self._next_call += 1
        out = call.attend(
            query.transpose(1, 2).flatten(0, 1),
            key.transpose(1, 2).flatten(0, 1),
            value.transpose(1, 2).flatten(0, 1),
            self._batch.for_group(call.group),
            scale=query.shape[3] ** -0.5 if scaling is None else scaling,
            softcap=softcap,
            sinks=s_aux,
            mask_rule=attention_mask,
            is_batch_invariant=self._is_batch_invariant,
            backend=self._backend,
        )
        return out.unflatten(0, (query.shape[0], query.shape[2])), None


def _return_rule(*_: Any, mask_function: MaskRule, **__: Any) -> MaskRule:
    """Return the rule itself, in the signature of transformers' mask functions."""
    return mask_function


def _classify(rule: MaskRule | None, max_model_len: int, device: torch.device) -> tuple[int | None, bool]:
    """Return ``(window, has_own_rule)`` of a mask rule, by evaluating it for a few queries and all keys."""
    if rule is None:
        return None, False
    keys = torch.arange(max_model_len, device=device)
    last = max_model_len - 1
    is_visible = rule(0, 0, torch.tensor([[last]], device=device), keys[None]).expand(1, max_model_len)
    window = int(is_visible.sum())
    probes = {0, 1, window - 2, window - 1, window, window + 1, last}
    probes.update(last * i // _PROBED_QUERIES for i in range(_PROBED_QUERIES))
    queries = torch.tensor(sorted(p for p in probes if 0 <= p <= last), device=device)[:, None]
    expected = (keys <= queries) & (keys > queries - window)
    if not torch.equal(rule(0, 0, queries, keys[None]).expand(len(queries), max_model_len), expected):
        return None, True
    return (window if window < max_model_len else None), False
