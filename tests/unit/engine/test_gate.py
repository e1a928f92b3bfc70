"""The gate of tests: a held request blocks no others, in engines of one batch and of stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.worker.engine.core.engine_core import EngineCore

from ... import fork_server
from ...gate import Gate
from .paged_hash import arrival, make_core, message

PROMPT = [5, 6, 5, 5, 6, 6, 5, 6, 5]


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate(tmp_path)
    monkeypatch.setenv(fork_server.GATE_VARIABLE, str(tmp_path / "gate"))
    monkeypatch.setattr(fork_server, "HELD_STEP_S", 0.0)
    for kind, name, method in fork_server.gated_methods(fork_server.CoreGate()):
        monkeypatch.setattr(kind, name, method)
    return gate


def tokens_after(core: EngineCore, num_steps: int) -> dict[str, int]:
    """Return the number of output tokens of each request."""
    for _ in range(num_steps):
        core.step_fn()
        core.check_invariants()
    return {name: request.num_output_tokens for name, request in core.scheduler._requests.items()}


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("is_caching", [False, True])
def test_a_request_that_returns_at_the_limit_does_not_block_others(
    gate: Gate, num_stages: int, is_caching: bool
) -> None:
    """It is not computed; others neither wait for the beginning that they share with it, nor for its turn."""
    core, _ = make_core(max_num_seqs=2, extra_budget=2, is_caching=is_caching, is_ahead=False, num_stages=num_stages)
    gate.hold_at(4)
    for name, num_delivered in (("held", 4), ("held, too", 4), ("behind", 1), ("last", 0)):
        core.add_request(message(name, arrival(prompt=PROMPT, num_delivered=num_delivered, max_tokens=9)))
    assert tokens_after(core, 80) == {"held": 4, "held, too": 4, "behind": 4, "last": 4}
    gate.open()
    assert tokens_after(core, 80) == {}


def test_batches_stay_in_flight(gate: Gate, tmp_path: Path) -> None:
    core, _ = make_core(num_stages=2)
    for name in "ab":
        core.add_request(message(name, arrival(max_tokens=9)))
    gate.keep_in_flight()
    assert tokens_after(core, 20) == {"a": 0, "b": 0}
    assert len(list(tmp_path.glob("gate.flying-*"))) == 1
    gate.open()
    assert tokens_after(core, 40) == {}
