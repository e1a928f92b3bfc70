"""Runs one scheduled step on a pooling model."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ....shared.params.pooling import Pooled, PoolingParams
from ...models.adapters.slots import AdapterSlots
from ...models.loaded import LoadedModel
from ...models.pooling.pooler import Pooler, PoolingModel, Rows
from ..core.step_input import IntArray, StepInput
from ..scheduling.request import Pooling, Request
from ..scheduling.scheduler_output import AcceleratorError, SampledTokens, SchedulerOutput
from .batch import InputBatch
from .model_runner import ModelRunner


def pooler_of(pooling: PoolingModel, params: PoolingParams) -> Pooler:
    """Return the pooler of the task in ``params``, by default of the model's first task."""
    return pooling.poolers[params.task or pooling.tasks[0]]


class PoolingRunner(ModelRunner):
    """The executor of a pooling model. It stores the hidden states that a chunked prompt needs at its last chunk."""

    def __init__(self, model: LoadedModel, batch: InputBatch, adapters: AdapterSlots | None = None) -> None:
        super().__init__(model, batch, adapters)
        assert model.pooling is not None
        self.pooling = model.pooling
        self._partial_states: dict[str, Tensor] = {}

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> SampledTokens:
        """Compute a step. Requests whose prompts are complete get their results; no request gets a token."""
        for request_id in output.released_ids:
            self._partial_states.pop(request_id, None)
        if self._adapters is not None:
            self._adapters.flush()
        step = self._batch.prepare(output)
        requests = [output.requests[index] for index in step.order.tolist()]
        step.token_types = _token_types(requests, step)
        try:
            pooled, partial_states = self._pool(requests, step)
        except torch.AcceleratorError as error:
            raise AcceleratorError(str(error)) from error
        # Commit last: if anything above raises, the step is computed again.
        self._model.forward.commit()
        self._partial_states.update(partial_states)
        return SampledTokens([[] for _ in requests], pooled=pooled)

    def warm_up(self, request: Request) -> None:
        """Pool ``request`` once in the first block."""
        self._batch.tables.assign_first_blocks(request)
        request.pooling = Pooling(PoolingParams(), reads_prefix_cache=False)
        self.execute(SchedulerOutput([request], [request.num_tokens]))
        self._batch.release([request.request_id])

    def _pool(self, requests: list[Request], step: StepInput) -> tuple[dict[str, Pooled], dict[str, Tensor]]:
        """Return the results of requests whose prompts end in this step, and the hidden states to store for the others.

        Args:
            requests: in the order of ``step``.
        """
        poolers = [pooler_of(self.pooling, _params_of(request)) for request in requests]
        pooled_rows = _pooled_rows(requests, poolers, step)
        states = self._forward(step, np.concatenate(pooled_rows)).split([len(rows) for rows in pooled_rows])
        ended: dict[int, list[tuple[Request, Tensor]]] = {}
        partial_states: dict[str, Tensor] = {}
        spans = zip(step.query_lens.tolist(), step.seq_lens.tolist(), strict=True)
        for request, pooler, hidden, (query_len, seq_len) in zip(requests, poolers, states, spans, strict=True):
            former = self._partial_states.get(request.request_id) if query_len < seq_len else None
            hidden = hidden if former is None else torch.cat([former, hidden])
            if seq_len == request.num_tokens:
                ended.setdefault(id(pooler), []).append((request, hidden))
            elif len(hidden):
                partial_states[request.request_id] = hidden.clone()  # since a later step may overwrite its memory
        by_id, pooled = {id(pooler): pooler for pooler in poolers}, dict[str, Pooled]()
        for key, group in ended.items():
            results = by_id[key]([hidden for _, hidden in group], [_params_of(request) for request, _ in group])
            pooled.update({request.request_id: result for (request, _), result in zip(group, results, strict=True)})
        return pooled, partial_states


def _params_of(request: Request) -> PoolingParams:
    return PoolingParams() if request.pooling is None else request.pooling.params


def _pooled_rows(requests: list[Request], poolers: list[Pooler], step: StepInput) -> list[IntArray]:
    """Return for each request the packed tokens of the step whose hidden states its pooler needs, ascending."""
    ends, pooled_rows = np.cumsum(step.query_lens), []
    for i, (request, pooler) in enumerate(zip(requests, poolers, strict=True)):
        start, end = ends[i] - step.query_lens[i], ends[i]
        if pooler.rows is Rows.LAST:
            start = end - int(step.seq_lens[i] == request.num_tokens)
        elif pooler.rows is Rows.FIRST:
            end = start + int(step.seq_lens[i] == step.query_lens[i])
        pooled_rows.append(np.arange(start, end))
    return pooled_rows


def _token_types(requests: list[Request], step: StepInput) -> IntArray | None:
    """Return 1 for tokens of the second text of a pair and 0 for others; None without pairs."""
    seconds = [None if request.pooling is None else request.pooling.second_text_at for request in requests]
    if all(second is None for second in seconds):
        return None
    first_of_second = np.array([step.positions.max() + 1 if second is None else second for second in seconds])
    return (step.positions >= np.repeat(first_of_second, step.query_lens)).astype(np.int64)
