"""From the requests of a step to the adapter of each token that a model is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.shared.params.sampling import SamplingParams
from penstock.worker.engine.composition import build_engine
from penstock.worker.engine.execution.model_runner import ModelRunner
from penstock.worker.engine.scheduling.request import NO_LORA, Request
from penstock.worker.models.forward import ModelInput

from ....conftest import DEMO_MODEL
from ..mixed_load import config


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=str)
def test_the_forward_receives_the_adapter_of_each_token(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token ids identify their request; in deterministic mode each request shares a tile with neighbours."""
    core = build_engine(config(enable_lora=True, **options), DEMO_MODEL).core
    runner = core._executor
    assert isinstance(runner, ModelRunner)
    given: list[ModelInput] = []
    run = runner._model.forward.run

    def record(step: ModelInput) -> torch.Tensor:
        given.append(step)
        return run(step)

    monkeypatch.setattr(runner._model.forward, "run", record)

    def serve(lora_indices: list[int]) -> None:
        given.clear()
        for index, lora_index in enumerate(lora_indices):
            params = SamplingParams(max_tokens=5, ignore_eos=True, seed=1, allowed_token_ids=[10 + index])
            prompt = [10 + index] * (3 + 7 * index)
            request = Request(str(index), prompt, params, max_model_len=99, lora_index=lora_index)
            core.scheduler.add_request(request)
        while core.has_work:
            assert all(output.error is None for output in core.step())

    serve([NO_LORA, NO_LORA])
    assert given
    assert all(step.token_lora is None for step in given)
    serve([4, NO_LORA, 0])
    adapter_of = {10: 4, 11: NO_LORA, 12: 0}
    for step in given:
        assert step.token_lora is not None
        assert step.token_lora.shape == step.token_ids.shape
        assert step.token_lora.dtype in (torch.int32, torch.int64)
        assert step.token_lora.tolist() == [adapter_of[token_id] for token_id in step.token_ids.tolist()]
    assert any(len(set(step.token_ids.tolist())) == 3 for step in given)
