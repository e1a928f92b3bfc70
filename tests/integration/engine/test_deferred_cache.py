"""An engine that waits without a KV cache computes the same once it has one."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.control.engine import ExecuteDummyBatch, IsSleeping, SleepState, WakeUp

from .harness import MakeEngine, ask, refusal, tokens

OPTIONS: list[dict[str, Any]] = [
    {},
    {"deterministic": True},
    {"speculative": "ngram:2"},
    {"kv_cache_dtype": "int8"},
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_same_tokens_with_a_cache_that_comes_later(
    make_engine: MakeEngine, device: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # More blocks than the warm-up has.
    serving, waiting = (
        make_engine(device=device, max_num_seqs=16, defers_cache=defers_cache, **options)
        for defers_cache in (False, True)
    )
    assert serving.ready.num_blocks > 64
    assert waiting.ready.num_blocks == serving.ready.num_blocks
    forward = waiting.control._parts.rpc_engine.model.forward
    assert sum(cache.nbytes for cache in forward.caches) == 0
    assert ask(waiting, IsSleeping()) == SleepState(1, ["kv_cache"])
    assert refusal(waiting, ExecuteDummyBatch()).message == "the engine's kv_cache sleep; wake them up first"

    allocate = forward.allocate

    def no_memory(num_blocks: int, *sizes: Any) -> None:
        if num_blocks:
            raise MemoryError("the memory is not free yet")
        allocate(num_blocks, *sizes)

    with monkeypatch.context() as patch:
        patch.setattr(forward, "allocate", no_memory)
        error = refusal(waiting, WakeUp(["kv_cache"]))
        assert (error.code, "the engine still sleeps, because kv_cache" in error.message) == (
            "engine_call_failed",
            True,
        )
    # The weights are as they were, so nothing is computed from them again.
    monkeypatch.setattr(waiting.control._parts.sleep, "_on_awake", lambda: pytest.fail("the weights did not sleep"))
    assert ask(waiting, WakeUp(["kv_cache"])) == SleepState()
    assert sum(cache.nbytes for cache in forward.caches) > 0
    for seeded in ({}, {"temperature": 1.0, "seed": 3, "logprobs": 2}):
        assert tokens(waiting, **seeded) == tokens(serving, **seeded)
