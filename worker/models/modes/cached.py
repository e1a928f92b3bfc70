"""A step in several forwards through transformers' ``Cache``, for models that mix tokens outside our kernel, too.

States of convolutions and recurrences are stored in a pool of ours, with a row per request (``attention/caches.py``).
Keys and values are stored in the paged cache. The modes "split" and "gather" differ in how the model reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel, cache_utils

from ....kernels.paged_attention import PagedBatch
from ....shared.errors import ModelLoadError
from ..attention.caches import StatePool
from ..attention.call import AttentionCall
from ..forward import ForwardSettings, ModelInput
from .causal_lm import CausalLM
from .partition import CutRule, Part, cut, take

_PROBE_TOKENS = 2


class KeysAndValues(Protocol):
    """How a model comes to the keys and values in our paged cache. First ``record``, then ``allocate``."""

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
        """Learn from a forward of one request what is kept per token."""
        ...

    def begin(self, batch: PagedBatch) -> None:
        """Say what the next forward's tokens are: one per request, or those of one request."""
        ...

    def extend(self, new: Tensor) -> Tensor:
        """What the model is to attend to, given what it keeps of this forward's tokens, ``[B, H, T, D]``."""
        ...

    def mask(self, batch: PagedBatch) -> Tensor:
        """The 2D attention mask for the model, ``[B, T]`` of the new tokens or ``[B, S]`` of all: 0 is padding."""
        ...


class StepCache(DynamicCache):
    """The ``Cache`` that the model sees: its layers hold states only.

    Attributes:
        chooses_keys: the model keeps something by which it chooses the keys that count.
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
        """Verify, after a forward, that the model has put nothing into its layers of which we do not know.

        Raises:
            ModelLoadError: it has, so that one request would find what another has left.
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
    """See ``forward.Forward``.

    Raises:
        ModelLoadError: the model keeps what it needs of a request elsewhere than in transformers' ``Cache``.
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
            # Only among more keys than it chooses, so that no short trial would show it (Dots3, which chooses 8 of 11,
            # is off by 84 % with 9 tokens of padding, in transformers alone).
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
        place_of = {token: place for place, token in enumerate(step.logit_rows.tolist())}
        places: list[int] = []
        logits: list[Tensor] = []
        for piece in cut(step.batch, self._rule):
            slots = torch.from_numpy(step.state_slots[piece.rows]).to(step.token_ids.device)
            self._pool.begin(None if piece.is_fresh else slots)
            for part in piece.parts:
                wanted = [index for index, token in enumerate(part.tokens) if token in place_of]
                places += [place_of[part.tokens[index]] for index in wanted]
                logits.append(self._run_part(step, part, wanted))
            self._pool.take(slots)
        together = logits[0] if len(logits) == 1 else torch.cat(logits)
        if places == list(range(len(places))):
            return together
        return together[torch.tensor(places, device=together.device).argsort()]

    def commit(self) -> None:
        self._pool.commit()

    def profile(self, num_tokens: int, num_logit_rows: int) -> None:
        self._pool.begin(None)
        self._cache.num_past_tokens = 0
        positions = torch.arange(min(num_tokens, self._max_model_len), device=self._model.module.device)
        token_ids, rows = torch.zeros_like(positions), positions[-num_logit_rows:]
        mask = torch.ones_like(positions)[None]
        self._keys_and_values.record(lambda: self._forward(token_ids[None], positions[None], mask, rows))

    def _run_part(self, step: ModelInput, part: Part, wanted: list[int]) -> Tensor:
        """Logits of the tokens of ``part`` at ``wanted``, ``[len(wanted), V]``."""
        batch = part.batch_of(step.batch)
        self._keys_and_values.begin(batch)
        shape = (len(part.rows), part.query_len)
        self._cache.num_past_tokens = max(part.seq_lens) - part.query_len
        rows = torch.tensor(wanted if len(part.rows) == 1 else [0], dtype=torch.long, device=batch.device)
        logits = self._forward(
            take(step.token_ids, part.tokens).view(shape),
            take(step.positions, part.tokens).view(shape),
            self._keys_and_values.mask(batch),
            rows,
        )
        if len(part.rows) == 1:
            return logits[0]
        return logits[:, 0] if len(wanted) == len(part.rows) else logits[wanted, 0]

    def _forward(self, token_ids: Tensor, positions: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
        """Run ``[B, T]`` tokens; return logits ``[B, len(rows), V]``."""
        inputs = {"input_ids": token_ids, "attention_mask": mask, self._model.cache_argument: self._cache}
        if self._model.takes_positions:
            inputs["position_ids"] = positions
        return self._model.logits(rows, **inputs, use_cache=True)
