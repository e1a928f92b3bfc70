"""Whatever schema is accepted: the outputs of its grammar are JSON, and jsonschema finds them valid.

More of them, with shrinking: ``PENSTOCK_DRAWN_SCHEMAS=20000 pytest`` with this file; without, by seeds and with a count
of accepted schemas: ``python -m tests.unit.engine.structured.hunt``.
"""

from __future__ import annotations

import json
import os
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from penstock.worker.engine.structured.grammar import Backend

from .drawn_schemas import SchemaSource
from .walking import compiled, fault_of, load

NUM_SCHEMAS = int(os.environ.get("PENSTOCK_DRAWN_SCHEMAS", "150"))
# Most common schemas have a grammar with either library.
NUM_SOUND, LEAST_ACCEPTED = 60, 20


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return load(request.param)


# The walk through a grammar takes no draws, so the schema alone is made smaller.
@settings(
    max_examples=NUM_SCHEMAS,
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much),
)
@given(st.randoms(use_true_random=False))
@pytest.mark.timeout(0 if NUM_SCHEMAS > 1000 else 120)
def test_accepted_schemas_are_enforced(backend: Backend, rng: Random) -> None:
    schema = SchemaSource(rng).document()
    grammar = compiled(backend, schema, is_tight=len(json.dumps(schema)) % 2 == 0)
    if grammar is not None:
        note(json.dumps(schema))
        assert fault_of(grammar, schema) is None


def test_most_valid_schemas_are_accepted(backend: Backend) -> None:
    sources = (SchemaSource(Random(seed)) for seed in range(10_000))
    sound: list[Any] = [next(s.document() for s in sources if s.is_sound) for _ in range(NUM_SOUND)]
    grammars = [(schema, compiled(backend, schema)) for schema in sound]
    faults = [fault_of(grammar, schema) for schema, grammar in grammars if grammar is not None]
    assert faults == [None] * len(faults)
    assert len(faults) > LEAST_ACCEPTED
