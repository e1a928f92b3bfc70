"""Tries one model type in a process of its own, which may hang, or die, or take what it likes."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers.utils import logging as transformers_logging

from ...shared.errors import ConfigurationError
from ...shared.log import configure_logging
from . import trial
from .outcome import Outcome
from .small_config import small_config

_RESULT_FILE = "outcome.json"


Attempt = Callable[[str, Path], Outcome]


def try_in_child(model_type: str, timeout_s: float, attempt: Attempt | None = None) -> Outcome:
    """Try ``model_type``; says so if the process was not through in time or died.

    Args:
        attempt: what to try with it; by default ``try_model_type``.

    The child is forked, so that it need not import torch and transformers again; nothing here runs in threads.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        child = multiprocessing.get_context("fork").Process(
            target=_child, args=(attempt or try_model_type, model_type, folder)
        )
        child.start()
        child.join(timeout_s)
        if child.is_alive():
            child.kill()
            child.join()
            return Outcome(model_type=model_type, reason=f"not through after {timeout_s:.0f} s")
        result = folder / _RESULT_FILE
        if not result.is_file():
            return Outcome(model_type=model_type, reason=f"its process died with exit code {child.exitcode}")
        return msgspec.json.decode(result.read_bytes(), type=Outcome)


def try_model_type(model_type: str, folder: Path, options: dict[str, Any] | None = None) -> Outcome:
    """Try ``model_type`` in this process, in the empty ``folder``; ``options`` are of ``EngineConfig``."""
    options = options or {}
    outcome = Outcome(model_type=model_type)
    stage = "no model to try"
    try:
        config = small_config(model_type)
        trial.write_model(config, folder)
        stage = "not loaded"
        model = trial.load(folder, **options)
        outcome.mode = model.forward.mode
        stage = "no tokens to compare with"
        expectation = trial.find_model(config, folder)
        stage = "failed"
        outcome.told = trial.compare(folder, expectation, model, **options)
    except Exception as error:  # whatever an architecture's own code raises
        outcome.reason = f"{stage}: {first_line(error)}"
    return outcome


def _child(attempt: Attempt, model_type: str, folder: Path) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    configure_logging("error")
    outcome = attempt(model_type, folder)
    (folder / _RESULT_FILE).write_bytes(msgspec.json.encode(outcome))


def first_line(error: Exception) -> str:
    """What to tell of what was raised: the sentence of an error of ours, else its type and first line."""
    line = next(iter(str(error).strip().splitlines()), "")
    is_ours = isinstance(error, ConfigurationError | trial.UnsuitableModelError)
    return line if is_ours else f"{type(error).__name__}: {line}"
