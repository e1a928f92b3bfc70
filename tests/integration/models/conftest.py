"""Small random models, and what transformers makes of prompts with them: the survey's own, one per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.kernels import native
from penstock.ops.lab.survey import trial
from penstock.ops.lab.survey.small_config import small_config
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.models.loaded import LoadedModel

from ...native_library import native_as_before, own_cache, references

__all__ = ["own_cache", "references"]

# Enough for decodes beside each kind of chunk, and for keys in the next block: ``make models`` takes twice as many, and
# two prompts more.
NUM_NEW_TOKENS = 8


@dataclass
class SmallModel:
    folder: Path
    expectation: trial.Expectation
    loaded: LoadedModel

    def compare(self, **options: Any) -> dict[str, str]:
        """Run ``expectation`` through engines, all of which compute with ``loaded``, for each of ``WAYS``."""
        run = partial(trial.run_engine, model=self.loaded)
        return trial.compare(self.folder, self.expectation, self.loaded.forward, run, **options)

    def generate(self, core: EngineCore, prompts: list[list[int]] | None = None) -> list[list[int]]:
        """Return as many tokens of ``core`` for ``prompts`` (by default the expectation's) as are expected."""
        return trial.generate(core, prompts or self.expectation.prompts, self.expectation.num_new_tokens)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Keep torch off the other cores: the models are tiny."""
    torch.set_num_threads(1)


@pytest.fixture
def compiled() -> Iterator[None]:
    """The compiled library is in use, and afterwards only if it was before."""
    with native_as_before():
        assert native.load() is None
        yield


@pytest.fixture(scope="module")
def interpreted_kernels() -> Iterator[None]:
    """The kernels of a GPU run on a CPU; on a GPU they need nothing."""
    if torch.cuda.is_available():
        yield
        return
    from ...kernels.interpreter import interpreted  # imports Triton

    with interpreted():
        yield


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SmallModel]:
    """A small random model of a type of transformers; the same for the same type."""
    root = tmp_path_factory.mktemp("models")
    made: dict[str, SmallModel] = {}

    def make(model_type: str) -> SmallModel:
        if model_type not in made:
            folder = root / model_type
            expectation = trial.find_model(small_config(model_type), folder, NUM_NEW_TOKENS, trial.make_prompts()[:4])
            made[model_type] = SmallModel(folder, expectation, trial.load(folder))
        return made[model_type]

    return make
