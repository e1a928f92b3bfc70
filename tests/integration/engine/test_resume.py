"""A request that another engine had begun goes on with the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.worker.engine.core.engine_core import EngineCore

from .harness import generate, request

PARAMS = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.0},
    {"temperature": 0.8, "seed": 5, "top_k": 30, "top_p": 0.9},
]


@pytest.fixture(scope="module", params=[False, True], ids=["no caching", "caching"])
def core(make_core: Callable[..., EngineCore], request: pytest.FixtureRequest) -> EngineCore:
    """Without prefix caching everything is computed again, as on another engine."""
    return make_core("llama", enable_prefix_caching=request.param)


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("num_delivered", [1, 13, 29])
def test_the_rest_is_the_same(
    core: EngineCore, prompts: list[list[int]], params: dict[str, Any], num_delivered: int
) -> None:
    whole = generate(core, [request(str(i), prompt, **params) for i, prompt in enumerate(prompts)])
    resumed = generate(
        core, [request(str(i), prompt, whole[str(i)][:num_delivered], **params) for i, prompt in enumerate(prompts)]
    )
    assert {key: whole[key][:num_delivered] + rest for key, rest in resumed.items()} == whole


def test_sampled_tokens_follow_seed_and_request_id_not_the_batch(core: EngineCore, prompts: list[list[int]]) -> None:
    seeded = [request(str(i), prompts[2], temperature=1.0, seed=i) for i in range(4)]
    together = generate(core, seeded)
    assert len({tuple(tokens) for tokens in together.values()}) == 4
    assert generate(core, seeded[2:3])["2"] == together["2"]
    assert generate(core, [request("x", prompts[2], temperature=1.0, seed=3)])["x"] == together["3"]
