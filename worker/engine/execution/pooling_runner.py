"""Runs one step's work on a model that pools."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ....shared.params.pooling import Pooled, PoolingParams
from ...models.loaded import LoadedModel
from ...models.pooling.pooler import Pooler, PoolingModel, Rows
from ..core.executor import AcceleratorError
from ..core.step_input import IntArray, StepInput
from ..scheduling.request import Pooling, Request
from ..scheduling.scheduler_output import SampledTokens, SchedulerOutput
from .model_runner import ModelRunner


def pooler_of(pooling: PoolingModel, params: PoolingParams) -> Pooler:
    """Return what does the task that ``params`` name, or the model's own."""
    return pooling.poolers[params.task or pooling.tasks[0]]


class PoolingRunner(ModelRunner):
    """The executor of a model that pools. What is wanted of a prompt that comes in chunks is kept until its last."""

    def __init__(self, model: LoadedModel, *, max_num_seqs: int, block_size: int) -> None:
        super().__init__(model, max_num_seqs=max_num_seqs, block_size=block_size)
        assert model.pooling is not None
        self._pooling = model.pooling
        self._kept: dict[str, Tensor] = {}

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> SampledTokens:
        """See ``Executor``: no request gets a token, and those whose prompt is computed get their result."""
        for request_id in output.released_ids:
            self._kept.pop(request_id, None)
        step = self._batch.prepare(output)
        requests = [output.requests[place] for place in step.order.tolist()]
        step.token_types = _token_types(requests, step)
        try:
            pooled, kept = self._pool(requests, step)
        except torch.AcceleratorError as error:
            raise AcceleratorError(str(error)) from error
        # Last: should anything above raise, the step is computed again.
        self._model.forward.commit()
        self._kept.update(kept)
        return SampledTokens([[] for _ in requests], pooled=pooled)

    def warm_up(self, request: Request) -> None:
        """Pool ``request`` once in the first block."""
        self._batch.tables.lend_first(request)
        request.pooling = Pooling(PoolingParams(), reads_prefix_cache=False)
        self.execute(SchedulerOutput([request], [request.num_tokens]))
        self._batch.release([request.request_id])

    def _pool(self, requests: list[Request], step: StepInput) -> tuple[dict[str, Pooled], dict[str, Tensor]]:
        """The results of those of ``requests``, in the order of ``step``, whose prompts end with it, and the hidden
        states that the others will want."""
        poolers = [pooler_of(self._pooling, _params_of(request)) for request in requests]
        wanted = _wanted_rows(requests, poolers, step)
        states = self._forward(step, np.concatenate(wanted)).split([len(rows) for rows in wanted])
        ended: dict[int, list[tuple[Request, Tensor]]] = {}
        kept: dict[str, Tensor] = {}
        spans = zip(step.query_lens.tolist(), step.seq_lens.tolist(), strict=True)
        for request, pooler, found, (query_len, seq_len) in zip(requests, poolers, states, spans, strict=True):
            former = self._kept.get(request.request_id) if query_len < seq_len else None
            found = found if former is None else torch.cat([former, found])
            if seq_len == request.num_tokens:
                ended.setdefault(id(pooler), []).append((request, found))
            elif len(found):
                kept[request.request_id] = found.clone()  # a later step may write where it lies
        by_id, pooled = {id(pooler): pooler for pooler in poolers}, dict[str, Pooled]()
        for key, group in ended.items():
            results = by_id[key]([found for _, found in group], [_params_of(request) for request, _ in group])
            pooled.update({request.request_id: result for (request, _), result in zip(group, results, strict=True)})
        return pooled, kept


def _params_of(request: Request) -> PoolingParams:
    return PoolingParams() if request.pooling is None else request.pooling.params


def _wanted_rows(requests: list[Request], poolers: list[Pooler], step: StepInput) -> list[IntArray]:
    """For each request the packed tokens of the step whose hidden states are wanted, ascending."""
    ends, wanted = np.cumsum(step.query_lens), []
    for i, (request, pooler) in enumerate(zip(requests, poolers, strict=True)):
        start, end = ends[i] - step.query_lens[i], ends[i]
        if pooler.rows is Rows.LAST:
            start = end - int(step.seq_lens[i] == request.num_tokens)
        elif pooler.rows is Rows.FIRST:
            end = start + int(step.seq_lens[i] == step.query_lens[i])
        wanted.append(np.arange(start, end))
    return wanted


def _token_types(requests: list[Request], step: StepInput) -> IntArray | None:
    """1 for tokens of the second text of a pair; None if there is no pair."""
    seconds = [None if request.pooling is None else request.pooling.second_text_at for request in requests]
    if all(second is None for second in seconds):
        return None
    first_of_second = np.array([step.positions.max() + 1 if second is None else second for second in seconds])
    return (step.positions >= np.repeat(first_of_second, step.query_lens)).astype(np.int64)
