"""Logits processors of an operator with real models: batched, preempted, resumed, guessed, ahead; and failing ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.shared.errors import ConfigurationError
from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import build_engine
from penstock.worker.engine.core.engine_core import EngineCore

from ....processors import wanting
from ..harness import generate, request
from ..test_deterministic import CRAMPED

NUM_TOKENS = 14
PROCESSORS = tuple(f"penstock_tests_processors:{name}" for name in ("Ban", "Tired", "Broken"))
BANNED = list(range(0, 128, 2))
SEEDED: dict[str, Any] = {"temperature": 1.1, "seed": 5, "top_p": 0.95}
KINDS: list[dict[str, Any]] = [
    {"extra_args": wanting(ban={"token_ids": BANNED}, tired={"by": 2.5})},
    {"extra_args": wanting(tired={"by": 1.5}), **SEEDED},
    {"extra_args": wanting(tired={"by": 1.0}), "presence_penalty": 0.5, "logit_bias": {7: 3.0}, **SEEDED},
    {**SEEDED},
    {},
]


@pytest.fixture(autouse=True)
def operators_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processors under a name that can be imported from anywhere."""
    from .... import processors

    monkeypatch.setitem(__import__("sys").modules, "penstock_tests_processors", processors)


def requests_of_every_kind(prompts: list[list[int]], delivered: dict[str, list[int]]) -> list[EngineCoreRequest]:
    return [
        request(str(i), prompts[i], delivered.get(str(i)), **{"max_tokens": NUM_TOKENS, **kind})
        for i, kind in enumerate(KINDS)
    ]


def alone(core: EngineCore, prompts: list[list[int]]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for one in requests_of_every_kind(prompts, {}):
        tokens |= generate(core, [one])
    return tokens


def test_tokens_are_the_same_in_any_batch_and_after_every_preemption_and_resumption(
    make_core: Callable[..., EngineCore], prompts: list[list[int]]
) -> None:
    roomy = make_core("llama", deterministic=True, logits_processors=PROCESSORS)
    cramped = make_core("llama", deterministic=True, logits_processors=PROCESSORS, **CRAMPED)
    wholes = alone(roomy, prompts)
    assert not set(wholes["0"]) & set(BANNED)
    assert wholes == generate(roomy, requests_of_every_kind(prompts, {}))
    for num_delivered in range(0, NUM_TOKENS - 1, 3):
        given = {key: tokens[:num_delivered] for key, tokens in wholes.items()}
        rests = generate(roomy if num_delivered % 2 else cramped, requests_of_every_kind(prompts, given))
        assert {key: given[key] + rest for key, rest in rests.items()} == wholes
    assert cramped.scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize(
    "options", [{"speculative": "ngram"}, {"async_scheduling": True}, {"native_kernels": False}], ids=str
)
def test_every_other_way_of_sampling_gives_the_same(
    make_core: Callable[..., EngineCore], prompts: list[list[int]], options: dict[str, Any]
) -> None:
    expected = alone(make_core("llama", logits_processors=PROCESSORS), prompts)
    other = make_core("llama", logits_processors=PROCESSORS, **options)
    assert generate(other, requests_of_every_kind(prompts, {})) == expected


def test_greedy_tokens_are_those_of_a_plain_loop_over_transformers_logits(
    make_core: Callable[..., EngineCore], model_folder: Callable[[str], Path], prompts: list[list[int]]
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32)
    tokens = list(prompts[0])
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        tokens.append(int((logits - 2.5 * torch.bincount(torch.tensor(tokens), minlength=len(logits))).argmax()))
    core = make_core("llama", logits_processors=PROCESSORS)
    asked = request("tired", prompts[0], max_tokens=NUM_TOKENS, extra_args=wanting(tired={"by": 2.5}))
    assert generate(core, [asked])["tired"] == tokens[len(prompts[0]) :]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "logits processor 'broken' raised KeyError: 'no such thing'"),
        ("nothing", "logits processor 'broken' left no token to choose"),
        ("nan", "logits processor 'broken' left no token to choose: the highest logit is nan"),
        ("short", "logits processor 'broken' must return one logit for each token, got (3,)"),
        ("none", "logits processor 'broken' must return one logit for each token, got NoneType"),
    ],
)
def test_one_that_fails_is_its_own_requests_error(
    make_core: Callable[..., EngineCore], prompts: list[list[int]], how: str, said: str, async_scheduling: bool
) -> None:
    core = make_core("llama", logits_processors=PROCESSORS, async_scheduling=async_scheduling)
    beside = requests_of_every_kind(prompts, {})
    expected = generate(core, beside)
    broken = request("broken", prompts[5], max_tokens=NUM_TOKENS, extra_args=wanting(broken={"how": how}))
    tokens: dict[str, list[int]] = {one.request_id: [] for one in [*beside, broken]}
    ends: dict[str, EngineCoreOutput] = {}
    for one in [*beside, broken]:
        assert core.add_request(one) is None
    while core.has_work:
        for output in core.step_fn():
            tokens[output.request_id] += output.new_token_ids
            ends[output.request_id] = output
    core.check_invariants()
    error = ends["broken"].error
    assert error is not None
    assert len(tokens.pop("broken")) == 2
    assert error.message.startswith(said)
    assert (error.code, error.retryable) == ("logits_processor_failed", False)
    assert tokens == expected


@pytest.mark.parametrize(
    ("wanted", "code", "said"),
    [
        (wanting(other={}), "unsupported_parameter", "no processor 'other'; those there are: ban, broken, tired"),
        (wanting(ban={"token_ids": []}), "validation_error", "ban cannot be made of .* ValueError: token_ids must be"),
        ({"logits_processors": ["ban"]}, "validation_error", "must map names to dicts of arguments"),
        ({"logits_processors": {}, "a": 1}, "unsupported_parameter", "extra_args=.* is not supported"),
    ],
)
def test_invalid_arguments_of_logits_processors_are_refused_by_name(
    make_core: Callable[..., EngineCore], wanted: dict[str, Any], code: str, said: str
) -> None:
    core = make_core("llama", logits_processors=PROCESSORS)
    answer = core.add_request(request("r", [3, 4], extra_args=wanted))
    assert answer is not None
    assert answer.error is not None
    assert answer.error.code == code
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(answer.error.message)
    assert not core.has_work


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("penstock_tests_processors:Nameless", "must be a subclass of LogitsProcessor with a name"),
        ("penstock_tests_processors:wanting", "must be a subclass of LogitsProcessor"),
        ("penstock_tests_processors:Gone", "cannot be imported: AttributeError"),
        ("nowhere_at_all:Ban", "cannot be imported: ModuleNotFoundError"),
        ("ban", "'ban' is no entry point of the group penstock.logits_processors, of which none is installed"),
    ],
)
def test_wrong_logits_processors_are_reported_before_the_model_is_loaded(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=said):
        build_engine(EngineConfig(model="m", logits_processors=(name,)), tmp_path / "no model")
