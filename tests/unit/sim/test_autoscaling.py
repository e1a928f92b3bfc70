from __future__ import annotations

import pytest

from penstock.ops.sim.fleet import wanted_engines
from penstock.ops.sim.scenario import Autoscaling
from penstock.ops.statistics import jain_index

RULE = Autoscaling(least=2, most=10, wanted_wait_s=10)


@pytest.mark.parametrize(
    ("num_engines", "busy", "waiting_tokens", "tokens_per_s", "expected"),
    [
        (4, 0.0, 0, 4000, 2),  # never below the least
        (4, 0.9, 0, 4000, 4),  # running requests keep their engines
        (4, 1.0, 20_000, 4000, 6),  # an engine serves 10,000 tokens in the wait that is wanted
        (4, 1.0, 900_000, 4000, 10),  # never above the most
        (3, 1.0, 5_000, 0, 4),  # nothing measured yet: one more
        (0, 0.0, 5_000, 0, 2),
    ],
)
def test_number_of_wanted_engines(
    num_engines: int, busy: float, waiting_tokens: int, tokens_per_s: float, expected: int
) -> None:
    result = wanted_engines(
        RULE, num_engines=num_engines, busy=busy, waiting_tokens=waiting_tokens, tokens_per_s=tokens_per_s
    )
    assert result == expected


def test_jain_index() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1)
    assert jain_index([5.0, 0.0]) == pytest.approx(0.5)
    assert jain_index([1.0]) != jain_index([1.0])  # nothing to compare
