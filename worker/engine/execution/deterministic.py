"""Executors with batch-invariant results: a request's logits have the same bits in any batch.

So a generation that is interrupted at any token and prefilled elsewhere continues with the same tokens. The compiled
decoder gives a token the same bits in any batch, so only sampling must process rows one by one. Other models also need
forwards of fixed sizes (``models/loading/fixed_shapes.py``) and attention in products of fixed shapes
(``kernels/paged_attention/invariant.py``). Whether this suffices for a model on this machine is verified when it is
loaded (``models/loading/fixed_shapes.py``).
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ...models.adapters.slots import AdapterSlots
from ...models.loaded import LoadedModel
from ...models.loading.fixed_shapes import PackedTokens, choose_tile_sizes, forward_in_tiles
from ..core.step_input import IntArray, StepInput
from ..sampling.sampler import samples_rows_independently
from .batch import InputBatch
from .model_runner import LogprobsByRow, ModelRunner


class DeterministicRunner(ModelRunner):
    """A ``ModelRunner`` for a model whose logits have the same bits in any forward."""

    _is_batch_invariant = True

    def _sample_rows(self, logits: Tensor, rows: IntArray, num_tokens: IntArray) -> tuple[IntArray, LogprobsByRow]:
        if samples_rows_independently(logits, self._batch.sampling.select(rows, num_tokens)):
            return super()._sample_rows(logits, rows, num_tokens)
        token_ids = np.zeros(len(rows), np.int64)
        logprobs: LogprobsByRow = {}
        for index in range(len(rows)):
            parameters = self._batch.sampling.select(rows[index : index + 1], num_tokens[index : index + 1])
            # A copy, so that the row begins at aligned memory, wherever it was among the others.
            token_ids[index : index + 1], row_logprobs = self._sample(logits[index : index + 1].clone(), parameters)
            if row_logprobs:
                logprobs[index] = row_logprobs[0]
        return token_ids, logprobs


class TiledRunner(DeterministicRunner):
    """A ``DeterministicRunner`` for a model with batch-invariant attention, with forwards of a few sizes.

    The constructor chooses the sizes by forwards with a temporary cache.

    Raises:
        ConfigurationError: no size gives equal bits; the message says why.
    """

    def __init__(self, model: LoadedModel, batch: InputBatch, adapters: AdapterSlots | None = None) -> None:
        super().__init__(model, batch, adapters)
        self._tile_sizes = choose_tile_sizes(model)

    def _forward(self, step: StepInput, logit_rows: IntArray) -> Tensor:
        tokens = PackedTokens(
            token_ids=step.token_ids,
            positions=step.positions,
            slot_mapping=step.slot_mapping,
            block_table=self._batch.block_table,
            table_rows=np.repeat(step.rows, step.query_lens),
            logit_rows=logit_rows,
            inputs_embeds=self._inputs_embeds(step),
            token_lora=step.token_lora,
            group_tables=self._batch.tables.tables,
            group_slots=step.group_slots,
        )
        return forward_in_tiles(self._model, tokens, self._tile_sizes, self._batch.block_size)
