"""Real models with drafts, right and wrong: all that comes of a request is as without."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import build_engine
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.engine.drafting.drafters import Drafter, MakeDrafters, make_drafters
from penstock.worker.engine.drafting.speculation import NoMemory, Speculation
from penstock.worker.engine.offline.run import OfflineRequest, Phase, run_phases, run_workload
from penstock.worker.engine.scheduling.request import Request

from ....conftest import DEMO_MODEL
from ....oracle import Oracle
from ..harness import VOCAB_SIZE
from ..mixed_load import assert_equal, config, requests, run

DEMO_VOCAB_SIZE = 382
NUM_FREE_ROWS = 24


def core_of(options: EngineConfig, folder: Path, make: MakeDrafters | None = None) -> EngineCore:
    """An engine that drafts as ``make`` says, whatever this machine's free rows are; one that does not without."""
    core = build_engine(options, folder).core
    if make is not None:
        core.scheduler._drafting = Speculation(6, NUM_FREE_ROWS, NoMemory(make))
    return core


def whole_outputs(asked: list[EngineCoreRequest], found: dict[str, EngineCoreOutput]) -> dict[str, list[int]]:
    """With what a former engine has delivered."""
    return {one.request_id: (one.output_token_ids or []) + found[one.request_id].new_token_ids for one in asked}


def assert_both(core: EngineCore) -> None:
    """Guesses came true, and others did not."""
    stats = core.scheduler.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_speculation_changes_no_output() -> None:
    """Covers penalties, grammars, rules, log probabilities, minima, and too little KV cache for all requests."""
    plain = core_of(config(), DEMO_MODEL)
    expected = run(plain, requests())
    oracle = Oracle(whole_outputs(requests(), expected), 0.8, DEMO_VOCAB_SIZE)
    for make in (oracle, make_drafters):
        core = core_of(config(), DEMO_MODEL, make)
        assert_equal(run(core, requests()), expected)
        assert_both(core)
        stats = core.scheduler.stats()
        assert stats.num_preemptions > 0
        assert stats.num_generation_tokens == plain.scheduler.stats().num_generation_tokens
        assert stats.step_counter < plain.scheduler.stats().step_counter


def test_a_speculating_engine_resumes_the_request_of_another() -> None:
    roomy = {"kv_cache_memory": 64 << 20}
    asked = requests()
    expected = run(core_of(config(**roomy), DEMO_MODEL), asked)
    whole, rng = whole_outputs(asked, expected), random.Random(4)
    begun = {one.request_id: len(one.output_token_ids or []) for one in asked}
    cut = {name: rng.randrange(first, max(len(whole[name]), first + 1)) for name, first in begun.items()}
    resumed = [
        msgspec.structs.replace(one, output_token_ids=whole[one.request_id][: cut[one.request_id]]) for one in asked
    ]
    core = core_of(config(**roomy), DEMO_MODEL, Oracle(whole, 0.8, DEMO_VOCAB_SIZE))
    found = whole_outputs(resumed, run(core, resumed))
    assert found == whole
    assert_both(core)


def test_in_deterministic_mode_speculation_changes_no_bit() -> None:
    expected = run(core_of(config(deterministic=True), DEMO_MODEL), requests())
    oracle = Oracle(whole_outputs(requests(), expected), 0.8, DEMO_VOCAB_SIZE)
    core = core_of(config(deterministic=True), DEMO_MODEL, oracle)
    assert run(core, requests()) == expected
    assert_both(core)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {"dtype": "bfloat16"}),
        ("qwen3", {"quantization": "int8"}),
        ("mistral", {"native_kernels": False}),
        ("gemma2", {}),
    ],
    ids=str,
)
def test_models_of_other_kinds(model: str, options: dict[str, Any], model_folder: Callable[[str], Path]) -> None:
    """Windows, several kernels, and layers that transformers computes."""
    folder = model_folder(model)
    made = config(model=str(folder), max_model_len=128, kv_cache_memory=8 << 20, **options)
    asked = [
        msgspec.structs.replace(one, prompt_token_ids=[t % VOCAB_SIZE for t in one.prompt_token_ids or []])
        for one in requests()[:16]
        if one.sampling_params.structured_outputs is None and one.output_token_ids is None  # type: ignore[union-attr]
    ]
    expected = run(core_of(made, folder), asked)
    core = core_of(made, folder, Oracle(whole_outputs(asked, expected), 0.7, VOCAB_SIZE))
    assert_equal(run(core, asked), expected)
    assert_both(core)


def test_an_engine_with_speculation_measures_its_free_rows() -> None:
    engine = build_engine(config(speculative="ngram:4", deterministic=True), DEMO_MODEL)
    assert isinstance(engine.core.scheduler._drafting, Speculation)
    assert engine.ready.speculative == "ngram:4"
    assert 1 <= engine.ready.num_free_rows <= 48
    assert engine.core.scheduler._drafting.num_free_rows == engine.ready.num_free_rows


def test_a_workload_file_applies_grammars_and_reports_draft_tokens() -> None:
    core = core_of(config(speculative="ngram:4"), DEMO_MODEL)
    core.scheduler._drafting = Speculation(4, NUM_FREE_ROWS)
    given = {"temperature": 0.0, "max_tokens": 12, "structured_outputs": {"regex": "( seven eight){6}"}}
    found = run_workload(core, [OfflineRequest([1, 40, 41], given)], 0.0)
    assert found.num_draft_tokens >= found.num_accepted_tokens > 0
    assert len(found.output_token_ids[0]) > found.num_steps
    again = run_workload(core, [OfflineRequest([1, 40, 41], given | {"max_tokens": 1})], 0.0)
    assert (again.num_draft_tokens, again.num_accepted_tokens) == (0, 0)


def test_phases_can_disable_drafts_and_clear_the_cache() -> None:
    """A comparison uses one engine, and neither phase may reuse the cached prompts of the other."""
    params = {"temperature": 5.0, "seed": 3, "max_tokens": 12, "ignore_eos": True}
    work = [OfflineRequest([1, *range(first, first + 40)], params) for first in range(40, 120, 20)]
    core = build_engine(config(), DEMO_MODEL).core
    said = run_workload(core, work, load_s=0.0).output_token_ids
    coming = {tuple(one.prompt_token_ids): tokens for one, tokens in zip(work, said, strict=True)}
    assert len({*map(tuple, said)}) == 4

    def make(request: Request) -> list[Drafter]:
        """Make drafts like a drafter that looks at its request once."""
        return Oracle({request.request_id: coming[tuple(request.prompt_token_ids)]}, 1.0, DEMO_VOCAB_SIZE)(request)

    core.scheduler._enabled_drafting = Speculation(6, NUM_FREE_ROWS, NoMemory(make))
    phases = [
        Phase("on", work[:2], is_fresh=True),
        Phase("off", work[:1], is_guessing=False, is_fresh=True),
        Phase("other", work[2:], is_fresh=True),
        Phase("cached", work[2:], is_guessing=False),
    ]
    *_, told = run_phases(core, phases)
    on, off, other, cached = told.phases
    assert [one.output_token_ids for one in told.phases] == [said[:2], said[:1], said[2:], said[2:]]
    assert off.num_draft_tokens == cached.num_draft_tokens == 0
    # Each drafts for the requests that it has, though others had their ids.
    assert 0 < on.num_draft_tokens == on.num_accepted_tokens
    assert 0 < other.num_draft_tokens == other.num_accepted_tokens
    hits = [one.prefix_cache_hits for one in told.phases]
    assert hits[0] == hits[1] == hits[2] < hits[3]
