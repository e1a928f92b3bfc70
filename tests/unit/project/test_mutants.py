"""The table of mutations fits the sources that it changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.ops.lab.mutants.mutation import Mutation
from penstock.ops.lab.mutants.table import MUTATIONS

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.defect)
def test_a_mutation_changes_its_file(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text()
    assert mutation.apply(source) != source
    assert all((ROOT / tests).exists() for tests in mutation.tests)
