"""The speed of an engine, from the steps that it was recorded to make."""

from __future__ import annotations

import msgspec
import numpy

from ...shared.errors import ConfigurationError
from ...shared.stats import StepStats
from .scenario import Speed

MIN_STEPS = 20
NUM_ROUNDS = 30
SMALLEST_ERROR_MS = 1e-4


class _Phase(msgspec.Struct):
    steps: list[StepStats] = []


class _Recorded(msgspec.Struct):
    """Output of ``python -m penstock.worker.engine.offline --steps``: of one workload, or of several phases."""

    steps: list[StepStats] = []
    phases: list[_Phase] = []


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A speed, and how well it tells the time of a step: ``error`` is the median error over the median step."""

    speed: Speed
    num_steps: int
    error: float


def fit_speed(data: bytes) -> Fit:
    """Fit a speed with no part below 0, by the least sum of errors.

    Not of their squares: a step that the machine held up for something else must not count for more than it is. A part
    that would be negative is left out, and the others are fitted anew.

    Raises:
        ConfigurationError: the bytes are no output of the offline engine, or hold too few steps.
    """
    try:
        recorded = msgspec.json.decode(data, type=_Recorded)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"this is no output of the offline engine: {error}") from error
    phases = [step for phase in recorded.phases for step in phase.steps]
    steps = [step for step in recorded.steps + phases if step.num_reqs]
    if len(steps) < MIN_STEPS:
        raise ConfigurationError(
            f"a fit needs {MIN_STEPS} steps, this has {len(steps)}: record them with --steps of "
            "'python -m penstock.worker.engine.offline'"
        )
    causes = numpy.array([[1.0, step.num_reqs - step.num_prefill_reqs, step.num_prefill_tokens] for step in steps])
    times_ms = numpy.array([1000 * step.step_time_s for step in steps])
    parts = _fit_from_zero(causes, times_ms)
    error = float(numpy.median(numpy.abs(causes @ parts - times_ms)) / numpy.median(times_ms))
    fixed_ms, ms_per_seq, ms_per_prompt_token = (round(float(part), 5) for part in parts)
    speed = Speed(fixed_ms=fixed_ms, ms_per_seq=ms_per_seq, ms_per_prompt_token=ms_per_prompt_token)
    return Fit(speed=speed, num_steps=len(steps), error=error)


def _fit_from_zero(causes: numpy.ndarray, times_ms: numpy.ndarray) -> numpy.ndarray:
    used = [column for column in range(causes.shape[1]) if causes[:, column].any()]
    parts = numpy.zeros(causes.shape[1])
    while used:
        found = _least_errors(causes[:, used], times_ms)
        if (found >= 0).all():
            parts[used] = found
            return parts
        del used[int(found.argmin())]
    return parts


def _least_errors(causes: numpy.ndarray, times_ms: numpy.ndarray) -> numpy.ndarray:
    """The parts with the least sum of absolute errors, by least squares whose weights are those errors' inverses."""
    weights = numpy.ones(len(times_ms))
    parts = numpy.zeros(causes.shape[1])
    for _ in range(NUM_ROUNDS):
        parts = numpy.linalg.lstsq(causes * weights[:, None], times_ms * weights, rcond=None)[0]
        weights = numpy.maximum(numpy.abs(causes @ parts - times_ms), SMALLEST_ERROR_MS) ** -0.5
    return parts
