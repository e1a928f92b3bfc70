"""A model that raises for one request: its neighbours get the tokens that they get without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.engine.execution.model_runner import ModelRunner
from penstock.worker.models.forward import Forward, ModelInput

from ..harness import VOCAB_SIZE, generate, request


def raise_at(monkeypatch: pytest.MonkeyPatch, forward: Forward, token_id: int) -> None:
    """Let ``forward`` raise when it computes ``token_id``."""
    run_step = forward.run

    def check(step: ModelInput) -> Tensor:
        if (step.token_ids == token_id).any():
            raise RuntimeError("no such token")
        return run_step(step)

    monkeypatch.setattr(forward, "run", check)


def run(core: EngineCore, requests: list[Any], late: list[Any]) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Tokens and errors of ``requests``; those of ``late`` join after some steps."""
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests + late}
    errors: dict[str, str] = {}
    for r in requests:
        core.add_request(r)
    num_steps = 0
    while core.has_work:
        num_steps += 1
        if num_steps == 5:
            for r in late:
                core.add_request(r)
        for output in core.step_fn():
            tokens[output.request_id] += output.new_token_ids
            if output.error is not None:
                errors[output.request_id] = output.error.message
        core.check_invariants()
    return tokens, errors


@pytest.mark.parametrize("num_blocks", [100, 22])
def test_neighbours_of_a_request_that_raises_are_not_disturbed(
    make_core: Callable[..., EngineCore], prompts: list[list[int]], num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(
        "llama", num_blocks=num_blocks, block_size=4, max_model_len=80, max_num_seqs=8, max_num_batched_tokens=24
    )
    innocents = [request(str(index), prompt) for index, prompt in enumerate(prompts)]
    innocents[2] = request("2", prompts[2], temperature=1.0, seed=5)
    undisturbed = generate(core, innocents)
    used = set().union(*prompts, *undisturbed.values())
    poison_id = next(token_id for token_id in range(VOCAB_SIZE) if token_id not in used)
    runner = core._executor
    assert isinstance(runner, ModelRunner)
    poison = [request("long", [7] * 30 + [poison_id]), request("short", [poison_id])]
    with monkeypatch.context() as patch:
        raise_at(patch, runner._model.forward, poison_id)
        tokens, errors = run(core, innocents, poison)
    assert (core.scheduler.stats().num_preemptions > 0) == (num_blocks == 22)
    assert set(errors) == {"long", "short"}
    assert all("RuntimeError" in message for message in errors.values())
    assert {request_id: tokens[request_id] for request_id in undisturbed} == undisturbed
    assert generate(core, innocents) == undisturbed
