"""The layout that an engine chooses for its options and its model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.setup.layouts import LAYOUTS, Bits, Steps, choose_layout


def choose(options: dict[str, Any], **properties: Any) -> Any:
    """Choose for a model with these properties whose layers do not show that rows are independent."""
    defaults = {"pooling": None, "expert_ranks": None, "is_row_independent": False}
    model: Any = SimpleNamespace(**defaults | properties)
    return choose_layout(EngineConfig(model="m", **options), model)


@pytest.mark.parametrize(
    ("options", "properties", "steps", "bits"),
    [
        ({}, {}, Steps.PLAIN, Bits.ANY),
        ({"async_scheduling": True}, {}, Steps.LOOKAHEAD, Bits.ANY),
        ({"device": "cuda"}, {}, Steps.LOOKAHEAD, Bits.ANY),
        ({"device": "cuda", "async_scheduling": False}, {}, Steps.PLAIN, Bits.ANY),
        ({"device": "cuda", "speculative": "ngram"}, {}, Steps.PLAIN, Bits.ANY),
        ({"device": "cuda", "tensor_parallel_size": 2}, {}, Steps.PLAIN, Bits.ANY),
        ({"deterministic": True}, {}, Steps.PLAIN, Bits.TILED),
        ({"deterministic": True, "async_scheduling": True}, {}, Steps.LOOKAHEAD, Bits.TILED),
        ({"pipeline_parallel_size": 2}, {}, Steps.STAGED, Bits.ANY),
        ({"tensor_parallel_size": 2}, {}, Steps.PLAIN, Bits.ANY),
        ({}, {"pooling": object()}, Steps.POOLING, Bits.ANY),
        ({"data_parallel_size": 2}, {"expert_ranks": object()}, Steps.LOCKSTEP, Bits.ANY),
    ],
)
def test_options_and_model_choose_the_layout(
    options: dict[str, Any], properties: dict[str, Any], steps: Steps, bits: Bits
) -> None:
    assert choose(options, **properties) is LAYOUTS[steps, bits]


def test_stages_compute_one_batch_at_a_time_in_tiles_and_log_the_reason() -> None:
    with capture_logs() as entries:
        layout = choose({"pipeline_parallel_size": 2, "deterministic": True})
    assert layout is LAYOUTS[Steps.PLAIN, Bits.TILED]
    assert [entry["event"] for entry in entries] == ["one_batch_in_flight"]
