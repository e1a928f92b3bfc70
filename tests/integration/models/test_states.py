"""State besides keys and values: it is a request's own, from its first token to its last, whatever happens between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.ops.lab.survey import trial
from penstock.ops.lab.survey.small_config import small_config
from penstock.shared.errors import ConfigurationError
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import build_engine
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.engine.core.step_input import StepInput
from penstock.worker.engine.execution.model_runner import ModelRunner
from penstock.worker.engine.scheduling.prefix_cache import NoPrefixCache
from penstock.worker.engine.scheduling.scheduler_output import SchedulerOutput
from penstock.worker.models.forward import Forward
from penstock.worker.models.lean.native import NativeForward
from penstock.worker.models.modes.cached import CachedForward

from ..engine.harness import generate, request
from .conftest import SmallModel


def runner_of(core: EngineCore) -> ModelRunner:
    runner = core._executor
    assert isinstance(runner, ModelRunner)
    return runner


def spoil(forward: Forward, slots: list[int]) -> None:
    """Put NaN into all that ``slots`` hold."""
    if isinstance(forward, CachedForward):
        for state in forward._pool._states:
            state.pool[slots] = float("nan")
        return
    assert isinstance(forward, NativeForward)
    for tensor in forward.lean.states.tensors():
        for slot in slots:
            tensor[2 * slot : 2 * slot + 2] = float("nan")


def spoil_fresh_slots(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put NaN into the slot of every request that begins, again and again; returns where the slots are noted."""
    runner = runner_of(core)
    batch = runner._batch
    prepare, spoilt = batch.prepare, []

    def prepare_and_spoil(output: SchedulerOutput) -> StepInput:
        step = prepare(output)
        fresh = step.rows[step.query_lens == step.seq_lens].tolist()
        spoilt.extend(fresh)
        spoil(runner._model.forward, fresh)
        return step

    monkeypatch.setattr(batch, "prepare", prepare_and_spoil)
    return spoilt


@pytest.mark.parametrize("model_type", ["bamba", "mamba", "lfm2"])
def test_a_slot_does_not_leak_its_previous_state(
    model_type: str, small_model: Callable[[str], SmallModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(model_type)
    core = trial.build(model.folder)
    spoilt = spoil_fresh_slots(core, monkeypatch)
    assert model.generate(core) == model.expectation.tokens
    assert len(spoilt) == len(model.expectation.prompts)


def test_a_preempted_request_begins_with_a_fresh_state(
    small_model: Callable[[str], SmallModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model("bamba")
    core = trial.build_cramped(model.folder, model.loaded.forward)
    spoilt = spoil_fresh_slots(core, monkeypatch)
    assert model.generate(core) == model.expectation.tokens
    num_preemptions = core.scheduler.stats().num_preemptions
    assert num_preemptions > 0
    assert len(spoilt) == len(model.expectation.prompts) + num_preemptions


@pytest.mark.parametrize("model_type", ["bamba", "mamba", "qwen3_next"])
def test_a_step_that_fails_after_its_forward_is_computed_again(
    model_type: str, small_model: Callable[[str], SmallModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(model_type)
    core = trial.build(model.folder, max_num_batched_tokens=16)
    runner, num_steps = runner_of(core), 0
    sample_rows = runner._sample_rows

    def fail_sometimes(logits, rows, num_tokens):
        nonlocal num_steps
        num_steps += 1
        if len(rows) > 1 and num_steps % 5 == 0:
            raise RuntimeError("sampling failed")
        return sample_rows(logits, rows, num_tokens)

    monkeypatch.setattr(runner, "_sample_rows", fail_sometimes)
    assert model.generate(core) == model.expectation.tokens
    assert num_steps > 10


def test_beginnings_of_requests_with_states_are_not_shared(small_model: Callable[[str], SmallModel]) -> None:
    model = small_model("bamba")
    core = trial.build(model.folder, enable_prefix_caching=True)
    assert isinstance(core.scheduler._prefix_cache, NoPrefixCache)
    prompt = model.expectation.prompts[3]
    assert model.generate(core, [prompt, prompt, prompt]) == [model.expectation.tokens[3]] * 3
    assert core.scheduler.stats().prefix_cache_queries == 0
    # A model that attends by itself has no other state, so its blocks are shared like anybody's.
    gathering = small_model("falcon")
    # The first computes its prompt in chunks, so the others wait for its blocks.
    core = trial.build(gathering.folder, max_num_batched_tokens=8)
    assert gathering.generate(core, [gathering.expectation.prompts[3]] * 3) == [gathering.expectation.tokens[3]] * 3
    assert core.scheduler.stats().prefix_cache_hits > 0


def test_too_little_memory_for_states_is_refused_with_the_remedy(small_model: Callable[[str], SmallModel]) -> None:
    model = small_model("bamba")
    memory = 6 * model.loaded.forward.bytes_per_request
    with pytest.raises(
        ConfigurationError, match=r"states of 6 requests need \d+ KiB of it: lower max_num_seqs or raise"
    ):
        trial.build(model.folder, kv_cache_memory=memory)


@pytest.mark.parametrize(("model_type", "mode"), [("mamba", "split"), ("bloom", "gather")])
def test_deterministic_needs_a_packed_model(
    model_type: str, mode: str, small_model: Callable[[str], SmallModel]
) -> None:
    folder = small_model(model_type).folder
    config = EngineConfig(model=str(folder), deterministic=True, max_model_len=32, num_threads=1)
    with pytest.raises(ConfigurationError, match=rf"--deterministic needs .*{mode!r}; start without"):
        build_engine(config, folder)


def test_deterministic_needs_a_model_without_states(small_model: Callable[[str], SmallModel]) -> None:
    config = EngineConfig(model=str(small_model("bamba").folder), deterministic=True, max_model_len=32, num_threads=1)
    with pytest.raises(ConfigurationError, match=r"--deterministic needs .*keeps states, too; start without"):
        build_engine(config, small_model("bamba").folder)


def test_speculation_is_refused_by_name(small_model: Callable[[str], SmallModel]) -> None:
    with pytest.raises(ConfigurationError, match=r"speculative 'ngram'.*mode 'split'"):
        trial.build(small_model("mamba").folder, speculative="ngram")
    with pytest.raises(ConfigurationError, match=r"speculative 'ngram'.*keeps states, which cannot undo a rejected"):
        trial.build(small_model("bamba").folder, speculative="ngram")


# The limits are as high as the check at load lets them be, so that many tokens show them.
@pytest.mark.parametrize(
    ("model_type", "time_step_min", "seed"), [("zamba2", 0.003, 0), ("nemotron_h", 0.015, 2), ("bamba", None, 0)]
)
def test_a_resumed_request_continues_with_the_same_tokens(
    model_type: str, time_step_min: float | None, seed: int, tmp_path: Path
) -> None:
    """Covers models that limit the step of a recurrence for several tokens, but not for one after a state."""
    config = small_config(model_type)
    if time_step_min is not None:
        config.time_step_min = time_step_min
    trial.write_model(config, tmp_path, seed)
    prompts = trial.make_prompts()
    core = trial.build(tmp_path)
    whole = generate(core, [request(str(i), prompt, max_tokens=16) for i, prompt in enumerate(prompts)])
    assert len({token for tokens in whole.values() for token in tokens}) > 8
    for num_delivered in (1, 7, 13):
        rest = generate(
            core,
            [request(str(i), prompt, whole[str(i)][:num_delivered], max_tokens=16) for i, prompt in enumerate(prompts)],
        )
        assert {key: whole[key][:num_delivered] + tokens for key, tokens in rest.items()} == whole
    # However prompts are cut, and whatever is computed again after a preemption.
    chunked = trial.build(tmp_path, max_num_batched_tokens=8)
    assert generate(chunked, [request(str(i), prompt, max_tokens=16) for i, prompt in enumerate(prompts)]) == whole


def test_a_budget_that_leaves_lone_tokens_is_refused(tmp_path: Path) -> None:
    trial.write_model(small_config("zamba2"), tmp_path)
    config = EngineConfig(model=str(tmp_path), max_model_len=64, max_num_seqs=2, max_num_batched_tokens=3)
    with pytest.raises(ConfigurationError, match=r"max_num_batched_tokens is 3, .* give 4 or more"):
        build_engine(config, tmp_path)
