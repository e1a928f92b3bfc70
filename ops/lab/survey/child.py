"""Trial of one model type in its own process, which may hang, die, or use any amount of memory."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from transformers.utils import logging as transformers_logging

from ....shared.errors import ConfigurationError
from ....shared.process.log import configure_logging
from ....worker.processes.process_tree import die_with
from . import trial
from .outcome import Outcome
from .small_config import small_config

_RESULT_FILE = "outcome.json"
Attempt = Callable[[str, Path], Outcome]
T = TypeVar("T")
_Caller = Callable[[type[Any], Callable[[], Any]], Any]


def try_in_child(model_type: str, timeout_s: float, attempt: Attempt | None = None) -> Outcome:
    """Try ``model_type`` in a child process. The outcome says if the child timed out or died.

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


class _Forward(msgspec.Struct):
    """Facts of a model that another process has loaded."""

    mode: str
    bytes_per_token: int
    bytes_per_request: int


def try_model_type(model_type: str, folder: Path, options: dict[str, Any] | None = None) -> Outcome:
    """Try ``model_type`` in this process, in the empty ``folder``; ``options`` are of ``EngineConfig``.

    Engines of several ranks run in forked processes, since each leaves threads of collectives behind, with which the
    next one could not fork its ranks.
    """
    options = options or {}
    call = _call_in_child if options else _call_here
    outcome = Outcome(model_type=model_type)
    stage = "no model to try"
    try:
        config = small_config(model_type)
        trial.write_model(config, folder)
        stage = "not loaded"
        forward = call(_Forward, partial(_load_model, folder, **options))
        outcome.mode = forward.mode
        stage = "no tokens to compare with"
        expectation = trial.find_model(config, folder)
        stage = "failed"
        # Engines of one rank run one after the other with one loaded model.
        run = partial(_run_engine, call) if options else partial(trial.run_engine, model=trial.load(folder))
        outcome.told = trial.compare(folder, expectation, forward, run, **options)
    except Exception as error:  # whatever an architecture's own code raises
        outcome.reason = f"{stage}: {first_line(error)}"
    return outcome


def _load_model(folder: Path, **options: Any) -> _Forward:
    forward = trial.load(folder, **options).forward
    return _Forward(forward.mode, forward.bytes_per_token, forward.bytes_per_request)


def _run_engine(call: _Caller, folder: Path, batches: list[list[list[int]]], **options: Any) -> trial.Generated:
    return call(trial.Generated, partial(trial.run_engine, folder, batches, **options))


def _call_here(_: type[T], work: Callable[[], T]) -> T:
    return work()


def _call_in_child(kind: type[T], work: Callable[[], T]) -> T:
    """Run ``work`` in a child process and return its result.

    Raises:
        _ChildError: it raised there, or the child died; the message has the reason.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_answer_in_child, args=(work, theirs, os.getpid()))
    child.start()
    theirs.close()
    with ours:
        try:
            failure, answer = ours.recv_bytes().split(b"\n", 1)
        except EOFError:
            child.join()
            raise _ChildError(f"its process died with exit code {child.exitcode}") from None
    child.join()
    if failure:
        raise _ChildError(failure.decode())
    return msgspec.json.decode(answer, type=kind)


class _ChildError(Exception):
    """Failure of a child process."""


def _answer_in_child(work: Callable[[], msgspec.Struct], pipe: Connection, parent_pid: int) -> None:
    die_with(parent_pid)  # which is killed when it takes too long
    try:
        pipe.send_bytes(b"\n" + msgspec.json.encode(work()))
    except Exception as error:
        pipe.send_bytes(first_line(error).encode() + b"\n")


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
    """Return the message of one of our errors, else the type and first line of an exception."""
    line = next(iter(str(error).strip().splitlines()), "")
    is_ours = isinstance(error, ConfigurationError | trial.UnsuitableModelError | _ChildError)
    return line if is_ours else f"{type(error).__name__}: {line}"
