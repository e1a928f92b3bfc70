"""The speed of engines, fitted to their recorded steps.

A step's time has two independent parts: its computation, which depends on its batch, and its wait for a processor that
others use. The speed is fitted to the CPU time (``cpu_time_s``). The slowdown is fitted to the waits, by the number of
recorded engines that computed at the same time. Wall times alone are too noisy: a step of the same batch takes three
times as long in one minute as in the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy

from ....shared.errors import ConfigurationError
from ....shared.stats import STEPS_SUFFIX, RecordedStep, StepStats, decode_steps
from ..scenario import Engines
from ..speed import Speed, StepWork

MIN_STEPS = 20
NUM_ROUNDS = 30
SMALLEST_ERROR_MS = 1e-4
# An engine whose quickest steps compute for less of their time waits for a device. Then wall times are fitted.
COMPUTING_SHARE = 0.9


class _Phase(msgspec.Struct):
    steps: list[StepStats] = []


class _Offline(msgspec.Struct):
    """Output of ``python -m penstock.worker.engine.offline --steps`` for one workload, or for several phases."""

    steps: list[StepStats] = []
    phases: list[_Phase] = []


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A speed, and factors on the duration of a step while one recorded engine computes, two, and so on."""

    speed: Speed
    slowdown: list[float]
    num_steps: int


class FitError(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of a speed for recorded steps.

    Args:
        of_computing: median error of a step's CPU time, relative to the median CPU time.
        of_step: the same for its wall time.
        of_total: relative error of the total time of all steps: 0.1 means too long by a tenth.
    """

    of_computing: float
    of_step: float
    of_total: float


def read_recordings(paths: Sequence[Path]) -> list[list[RecordedStep]]:
    """Return the steps of each engine, from files of ``--step-log`` in folders and from outputs of the offline engine.

    Raises:
        ConfigurationError: a path cannot be read, or is neither of these.
    """
    engines: list[list[RecordedStep]] = []
    for path in paths:
        try:
            files = sorted(path.rglob(f"*{STEPS_SUFFIX}")) if path.is_dir() else [path]
            engines += [
                decode_steps(file.read_bytes())
                if file.name.endswith(STEPS_SUFFIX)
                else _offline_steps(file.read_bytes())
                for file in files
            ]
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    if not engines:
        raise ConfigurationError(f"{', '.join(map(str, paths))} has no file of --step-log, *{STEPS_SUFFIX}")
    return engines


def _offline_steps(data: bytes) -> list[RecordedStep]:
    try:
        recorded = msgspec.json.decode(data, type=_Offline)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"this is not an output of the offline engine: {error}") from error
    ended_s, steps = 0.0, []
    for stats in (*recorded.steps, *(step for phase in recorded.phases for step in phase.steps)):
        ended_s += stats.step_time_s
        steps.append(RecordedStep(ended_s, stats.step_time_s, stats))
    return steps


def fit_speed(engines: Sequence[Sequence[RecordedStep]]) -> Fit:
    """Fit a speed without negative parts to the steps of engines of one kind, by least absolute errors.

    Squared errors would give too much weight to steps that were delayed by something else. A part that would be
    negative is left out, and the others are fitted again.

    Raises:
        ConfigurationError: the recordings have too few steps.
    """
    steps = [[step for step in own if step.stats.num_reqs] for own in engines]
    every = [step for own in steps for step in own]
    if len(every) < MIN_STEPS:
        raise ConfigurationError(
            f"a fit needs {MIN_STEPS} steps, this has {len(every)}: record them with --steps of "
            "'python -m penstock.worker.engine.offline', or with 'worker start --step-log'"
        )
    took_ms = numpy.array([1000 * step.took_s for step in every])
    computed_ms = numpy.array([1000 * step.stats.cpu_time_s for step in every])
    share = float(numpy.quantile(computed_ms / took_ms, 0.9))
    times_ms = computed_ms if share >= COMPUTING_SHARE else took_ms
    causes = numpy.array([_causes(work_of(step.stats)) for step in every])
    speed = Speed(
        **dict(
            zip(Speed.__struct_fields__, (round(float(part), 5) for part in _from_zero(causes, times_ms)), strict=True)
        )
    )
    predicted_ms = numpy.array([1000 * speed.step_s(work_of(step.stats)) for step in every])
    num_computing = _num_computing(steps)
    slowdown: list[float] = []
    for number in range(1, len(steps) + 1):
        of = num_computing == number
        # With hardly any steps, the factor for one engine less is used.
        is_seen = of.sum() >= MIN_STEPS
        factor = float(took_ms[of].sum() / predicted_ms[of].sum()) if is_seen else slowdown[-1] if slowdown else 1.0
        slowdown.append(round(factor, 3))
    return Fit(speed=speed, slowdown=slowdown, num_steps=len(every))


def error_of(kind: Engines, engines: Sequence[Sequence[RecordedStep]]) -> FitError:
    """Return the errors of ``kind`` for recorded steps."""
    steps = [[step for step in own if step.stats.num_reqs] for own in engines]
    every = [step for own in steps for step in own]
    took_s = numpy.array([step.took_s for step in every])
    predicted_s = numpy.array(
        [
            kind.step_s(work_of(step.stats), int(number))
            for step, number in zip(every, _num_computing(steps), strict=True)
        ]
    )
    own_s = numpy.array([kind.speed.step_s(work_of(step.stats)) for step in every])
    return FitError(
        of_computing=_median_error(own_s, numpy.array([step.stats.cpu_time_s for step in every])),
        of_step=_median_error(predicted_s, took_s),
        of_total=round(float(predicted_s.sum() / took_s.sum()) - 1, 3),
    )


def _median_error(predicted_s: numpy.ndarray, seen_s: numpy.ndarray) -> float:
    return round(float(numpy.median(numpy.abs(predicted_s - seen_s)) / max(1e-9, numpy.median(seen_s))), 3)


def work_of(stats: StepStats) -> StepWork:
    """Return the work of a recorded step."""
    return StepWork(
        num_decoding=stats.num_reqs - stats.num_prefill_reqs,
        num_context_tokens=stats.num_context_tokens,
        num_prompt_tokens=stats.num_prefill_tokens,
        num_prompt_pairs=stats.num_prefill_pairs,
    )


def _causes(work: StepWork) -> list[float]:
    """Return the factors of the parts of a speed, in their order."""
    return [
        1.0,
        work.num_decoding,
        work.num_prompt_tokens,
        work.num_context_tokens / 1000,
        work.num_prompt_pairs / 1000,
    ]


def _num_computing(engines: Sequence[Sequence[RecordedStep]]) -> numpy.ndarray:
    """Return the number of engines that computed in the middle of each step, for all engines."""
    ends = [numpy.array([step.ended_s for step in own]) for own in engines]
    begins = [numpy.array([step.ended_s - step.took_s for step in own]) for own in engines]
    middles = numpy.concatenate([(begin + end) / 2 for begin, end in zip(begins, ends, strict=True)])
    number = numpy.zeros(len(middles), dtype=int)
    for begin, end in zip(begins, ends, strict=True):
        if len(end):
            place = numpy.minimum(numpy.searchsorted(end, middles), len(end) - 1)
            number += (begin[place] <= middles) & (middles <= end[place])
    return numpy.maximum(number, 1)


def _from_zero(causes: numpy.ndarray, times_ms: numpy.ndarray) -> numpy.ndarray:
    used = [column for column in range(causes.shape[1]) if causes[:, column].any()]
    parts = numpy.zeros(causes.shape[1])
    while used:
        fitted = _least_errors(causes[:, used], times_ms)
        if (fitted >= 0).all():
            parts[used] = fitted
            return parts
        del used[int(fitted.argmin())]
    return parts


def _least_errors(causes: numpy.ndarray, times_ms: numpy.ndarray) -> numpy.ndarray:
    """Return the parts with the least sum of absolute errors, by least squares weighted with inverse errors."""
    weights = numpy.ones(len(times_ms))
    parts = numpy.zeros(causes.shape[1])
    for _ in range(NUM_ROUNDS):
        parts = numpy.linalg.lstsq(causes * weights[:, None], times_ms * weights, rcond=None)[0]
        weights = numpy.maximum(numpy.abs(causes @ parts - times_ms), SMALLEST_ERROR_MS) ** -0.5
    return parts
