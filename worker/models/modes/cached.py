"""A step in several forwards through transformers' ``Cache``, for models that mix tokens outside our kernel, too.

States of convolutions and recurrences are stored in a pool of ours, with a row per request (``attention/caches.py``).
Keys and values are stored in the paged cache. The two modes differ in how the model reads them:

- "split": by our kernel. It serves models with convolutions, Mamba or linear attention.
- "gather": by the model's own code, which asks its ``Cache`` for the past and attends to the result. The new keys and
  values are stored in our blocks, and the model gets those of each request in full, padded on the left to the longest
  one. This copies the past of every request in every layer and step: the price of not knowing how the model attends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel, cache_utils

from ....kernels.paged_attention import PagedBatch
from ....shared.errors import ModelLoadError
from ..attention.caches import PagedTensor, StatePool
from ..attention.call import AttentionCall, caches_of
from ..attention.paged_attention import PagedAttention
from ..forward import ForwardSettings, ModelInput
from .packed import CausalLM, install_attention
from .partition import CutRule, Part, cut, take

_PROBE_TOKENS = 2


class KeysAndValues(Protocol):
    """Access of a model to keys and values in our paged cache. Call ``record`` first, then ``allocate``."""

    @property
    def attention_calls(self) -> list[AttentionCall]:
        """See ``forward.Forward``."""
        ...

    @property
    def bytes_per_token(self) -> int: ...

    @property
    def caches(self) -> list[Tensor]:
        """See ``forward.Forward``."""
        ...

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> None: ...

    def record(self, run_forward: Callable[[], Any]) -> None:
        """Learn from a forward of one request which tensors are kept per token."""
        ...

    def begin(self, batch: PagedBatch) -> None:
        """Set the batch of the next forward: one token per request, or the tokens of one request."""
        ...

    def extend(self, new: Tensor) -> Tensor:
        """Return the keys or values to attend to, given those of this forward's tokens, ``[B, H, T, D]``."""
        ...

    def mask(self, batch: PagedBatch) -> Tensor:
        """Return the 2D attention mask for the model, ``[B, T]`` of new tokens or ``[B, S]`` of all; 0 is padding."""
        ...


class StepCache(DynamicCache):
    """The ``Cache`` that is passed to the model: its layers hold only states.

    Attributes:
        chooses_keys: the model keeps tensors by which it chooses the keys that count.
    """

    def __init__(self, config: PretrainedConfig, extend: Callable[[Tensor], Tensor]) -> None:
        super().__init__(config=config)
        for layer in self.layers:
            if type(layer).__module__ != cache_utils.__name__:
                raise ModelLoadError(f"it keeps a cache of its own kind, {type(layer).__name__}")
        self.num_past_tokens = 0
        self.chooses_keys = False
        self._extend = extend

    def check_holds_states_only(self) -> None:
        """Verify, after a forward, that the model has put no unknown tensors into its layers.

        Raises:
            ModelLoadError: it has, so requests would see tensors of other requests.
        """
        for layer in self.layers:
            for name, value in vars(layer).items():
                if isinstance(value, Tensor) and not name.startswith("_"):
                    raise ModelLoadError(f"it keeps {name} in its Cache")

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._extend(key_states), self._extend(value_states)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        self.chooses_keys = True
        return self._extend(indexer_key_states[:, None])[:, 0]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_past_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.num_past_tokens + query_length, 0


class CachedForward:
    """A ``forward.Forward`` in several forwards per step.

    Raises:
        ModelLoadError: the model keeps data of a request elsewhere than in transformers' ``Cache``.
    """

    def __init__(
        self,
        mode: str,
        module: PreTrainedModel,
        settings: ForwardSettings,
        keys_and_values: KeysAndValues,
        rule: CutRule,
    ) -> None:
        self.mode = mode
        self.network = module
        self._model = CausalLM(module)
        if self._model.cache_argument is None:
            raise ModelLoadError("it takes no transformers Cache")
        self._max_model_len = settings.max_model_len
        self._keys_and_values = keys_and_values
        self._rule = rule
        self._cache = StepCache(module.config, keys_and_values.extend)
        self._pool = StatePool(self._cache)
        self.profile(_PROBE_TOKENS, num_logit_rows=1)
        self._cache.check_holds_states_only()
        self._pool.discover()
        if self._cache.chooses_keys and rule.batches_decodes:
            # It matters only among more keys than it chooses, so no short trial would show it. Dots3, which chooses 8
            # of 11, is off by 84 % with 9 tokens of padding, even in transformers.
            raise ModelLoadError("it chooses among keys, and padding may change what it chooses")
        if not self.bytes_per_token and not self.keeps_state:
            raise ModelLoadError("it keeps nothing of a request in transformers' Cache")

    def network_of(self, module: PreTrainedModel) -> nn.Module:
        return module

    @property
    def takes_embeds(self) -> bool:
        return False

    @property
    def keeps_state(self) -> bool:
        return self.bytes_per_request > 0

    @property
    def attention_calls(self) -> list[AttentionCall]:
        return self._keys_and_values.attention_calls

    @property
    def bytes_per_token(self) -> int:
        return self._keys_and_values.bytes_per_token

    @property
    def caches(self) -> list[Tensor]:
        return self._keys_and_values.caches

    @property
    def bytes_per_request(self) -> int:
        return self._pool.bytes_per_request

    def allocate(self, num_blocks: int, block_size: int, num_slots: int, device: torch.device) -> None:
        self._keys_and_values.allocate(num_blocks, block_size, device)
        self._pool.allocate(num_slots, device)

    def run(self, step: ModelInput) -> Tensor:
        self._pool.discard()
        row_of = {token: place for place, token in enumerate(step.logit_rows.tolist())}
        rows: list[int] = []
        logits: list[Tensor] = []
        for piece in cut(step.batch, self._rule):
            slots = torch.from_numpy(step.state_slots[piece.rows]).to(step.token_ids.device)
            self._pool.begin(None if piece.is_fresh else slots)
            for part in piece.parts:
                indices = [index for index, token in enumerate(part.tokens) if token in row_of]
                rows += [row_of[part.tokens[index]] for index in indices]
                logits.append(self._run_part(step, part, indices))
            self._pool.take(slots)
        all_logits = logits[0] if len(logits) == 1 else torch.cat(logits)
        if rows == list(range(len(rows))):
            return all_logits
        return all_logits[torch.tensor(rows, device=all_logits.device).argsort()]

    def commit(self) -> None:
        self._pool.commit()

    def profile(self, num_tokens: int, num_logit_rows: int) -> None:
        self._pool.begin(None)
        self._cache.num_past_tokens = 0
        positions = torch.arange(min(num_tokens, self._max_model_len), device=self._model.module.device)
        token_ids, rows = torch.zeros_like(positions), positions[-num_logit_rows:]
        mask = torch.ones_like(positions)[None]
        self._keys_and_values.record(lambda: self._forward(token_ids[None], positions[None], mask, rows))

    def _run_part(self, step: ModelInput, part: Part, indices: list[int]) -> Tensor:
        """Return the logits of the tokens of ``part`` at ``indices``, ``[len(indices), V]``."""
        batch = part.batch_of(step.batch)
        self._keys_and_values.begin(batch)
        shape = (len(part.rows), part.query_len)
        self._cache.num_past_tokens = max(part.seq_lens) - part.query_len
        rows = torch.tensor(indices if len(part.rows) == 1 else [0], dtype=torch.long, device=batch.device)
        logits = self._forward(
            take(step.token_ids, part.tokens).view(shape),
            take(step.positions, part.tokens).view(shape),
            self._keys_and_values.mask(batch),
            rows,
        )
        if len(part.rows) == 1:
            return logits[0]
        return logits[:, 0] if len(indices) == len(part.rows) else logits[indices, 0]

    def _forward(self, token_ids: Tensor, positions: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        """Run ``[B, T]`` tokens; return logits ``[B, len(rows), V]``."""
        inputs = {"input_ids": token_ids, "attention_mask": mask, self._model.cache_argument: self._cache}
        if self._model.takes_positions:
            inputs["position_ids"] = positions
        return self._model.logits(rows, **inputs, use_cache=True)


class InterfaceAttention:
    """A ``cached.KeysAndValues`` for models that pass keys and values through transformers' attention interface."""

    def __init__(self, attention: PagedAttention, max_model_len: int) -> None:
        self._attention = attention
        self._max_model_len = max_model_len

    @property
    def attention_calls(self) -> list[AttentionCall]:
        return self._attention.calls

    @property
    def bytes_per_token(self) -> int:
        return self._attention.bytes_per_token

    @property
    def caches(self) -> list[Tensor]:
        return caches_of(self._attention.calls)

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        self._attention.allocate(num_blocks, block_size, device)

    def record(self, run_forward: Callable[[], Any]) -> None:
        self._attention.record(run_forward, self._max_model_len)

    def begin(self, batch: PagedBatch) -> None:
        self._attention.begin(batch)

    def extend(self, new: Tensor) -> Tensor:
        return new

    def mask(self, batch: PagedBatch) -> Tensor:
        # No padding, because the kernel knows the lengths and layers with states only read new tokens.
        return torch.ones((len(batch.query_lens), batch.query_lens[0]), dtype=torch.long, device=batch.device)


def split_forward(module: PreTrainedModel, settings: ForwardSettings, rule: CutRule) -> CachedForward:
    """Create a ``Forward`` for a model that attends by transformers' interface and keeps states in its ``Cache``."""
    attention = PagedAttention(is_batch_invariant=settings.is_batch_invariant, backend=settings.attention_backend)
    install_attention(module, attention.name)
    forward = CachedForward("split", module, settings, InterfaceAttention(attention, settings.max_model_len), rule)
    if not forward.keeps_state:
        raise ModelLoadError("it keeps no states, so that splitting it would mend nothing")
    return forward


class GatheredTokens:
    """A ``cached.KeysAndValues`` for all tensors that a model keeps per token, in the order in which it passes them."""

    def __init__(self) -> None:
        self._tensors: list[PagedTensor] = []
        self._batch: PagedBatch | None = None
        self._next = 0

    @property
    def attention_calls(self) -> list[AttentionCall]:
        return []

    @property
    def bytes_per_token(self) -> int:
        return sum(tensor.bytes_per_token for tensor in self._tensors)

    @property
    def caches(self) -> list[Tensor]:
        return [tensor.blocks for tensor in self._tensors]

    def allocate(self, num_blocks: int, block_size: int, device: torch.device) -> None:
        for tensor in self._tensors:
            tensor.allocate(num_blocks, block_size, device)

    def record(self, run_forward: Callable[[], Any]) -> None:
        self._batch, self._tensors = None, []
        run_forward()

    def begin(self, batch: PagedBatch) -> None:
        self._batch, self._next = batch, 0

    def extend(self, new: Tensor) -> Tensor:
        """Store ``new`` of this forward's tokens, ``[B, H, T, D]``; return the tensor of all tokens, ``[B, H, S, D]``.

        ``S`` is the longest request's length. Shorter ones repeat their first token on the left.
        """
        if new.ndim != 4:
            raise ModelLoadError(f"it keeps keys of shape {tuple(new.shape)}, where [B, H, T, D] was expected")
        if self._batch is None:
            self._tensors.append(PagedTensor((new.shape[1], new.shape[3]), new.dtype))
            return new
        cache = self._tensors[self._next].slots()
        self._next += 1
        cache[self._batch.slot_mapping.long()] = new.transpose(1, 2).flatten(0, 1)
        slots = self._batch.derived("left_padded", lambda batch=self._batch: left_padded_slots(batch))
        return cache[slots].transpose(1, 2)

    def mask(self, batch: PagedBatch) -> Tensor:
        return (_left_padded_positions(batch) >= 0).long()


def gather_forward(module: PreTrainedModel, settings: ForwardSettings, rule: CutRule) -> CachedForward:
    """Create a ``Forward`` for a model that keeps its keys and values in transformers' ``Cache``."""
    module.set_attn_implementation("eager")
    return CachedForward("gather", module, settings, GatheredTokens(), rule)


def left_padded_slots(batch: PagedBatch) -> Tensor:
    """Return the cache slots of all tokens of each request, ``[B, S]``, those of shorter ones at the end of their
    row.
    """
    positions = _left_padded_positions(batch).clamp(min=0)
    blocks = batch.block_table.long().gather(1, positions // batch.block_size)
    return blocks * batch.block_size + positions % batch.block_size


def _left_padded_positions(batch: PagedBatch) -> Tensor:
    """Return the position of each token, ``[B, S]``; below 0 is padding."""
    longest = max(batch.seq_lens)
    padding = longest - torch.tensor(batch.seq_lens, device=batch.device)
    return torch.arange(longest, device=batch.device) - padding[:, None]
