"""How many torch threads a CPU engine chooses."""

from __future__ import annotations

import pytest

from penstock.worker.config import EngineConfig
from penstock.worker.engine import composition


@pytest.mark.parametrize(
    ("cores", "num_engines", "num_parameters", "asked", "expected"),
    [
        (2, 1, 135_000_000, 0, 1),
        (16, 1, 135_000_000, 0, 15),
        (16, 4, 135_000_000, 0, 3),
        (2, 4, 135_000_000, 0, 1),
        (16, 1, 1_000_000, 0, 1),
        (2, 1, 1_000_000, 2, 2),
    ],
)
def test_a_core_is_left_to_others(
    monkeypatch: pytest.MonkeyPatch, cores: int, num_engines: int, num_parameters: int, asked: int, expected: int
) -> None:
    monkeypatch.setattr(composition, "usable_cores", lambda: cores)
    config = EngineConfig(model="m", num_threads=asked, num_engines_on_host=num_engines)
    assert composition.choose_num_threads(config, num_parameters) == expected
