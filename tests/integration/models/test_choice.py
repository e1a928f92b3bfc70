"""Which way of computing a model is chosen at load."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.ops.lab.survey.trial import MAX_MODEL_LEN
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.models.loaded import LoadedModel
from penstock.worker.models.loading.loader import load_model
from penstock.worker.models.modes.cached import CachedForward
from penstock.worker.models.modes.partition import CutRule

from .conftest import SmallModel


def rule_of(model: LoadedModel) -> CutRule | None:
    forward = model.forward
    return forward._rule if isinstance(forward, CachedForward) else None


@pytest.mark.parametrize(
    ("model_type", "mode", "continues_chunks", "batches_decodes"),
    [
        ("falcon_h1", "split", True, True),
        ("jamba", "split", False, True),  # in bfloat16 what it gets wrong is near to rounding
        ("mamba", "split", False, True),
        ("bloom", "gather", True, True),
        ("gpt_neox_japanese", "gather", True, False),  # counts positions by itself, padding included
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_choice_does_not_depend_on_the_precision(
    model_type: str,
    mode: str,
    continues_chunks: bool,
    batches_decodes: bool,
    dtype: str,
    small_model: Callable[[str], SmallModel],
) -> None:
    folder = small_model(model_type).folder
    model = load_model(EngineConfig(model=str(folder), dtype=dtype, max_model_len=MAX_MODEL_LEN), folder)
    rule = rule_of(model)
    assert rule is not None
    assert (model.forward.mode, rule.continues_chunks, rule.batches_decodes) == (
        mode,
        continues_chunks,
        batches_decodes,
    )
