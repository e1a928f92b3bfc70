"""Computation of the table's figures from the times of tokens."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from typing import Any


def percentile(values: list[float], share: float) -> float | None:
    """Return the nearest-rank percentile; None without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def serving_figures(phase: dict[str, Any]) -> dict[str, Any]:
    """Throughput, time to the first token and between two, of a phase of the engine or of its rival."""
    times = phase["token_times_s"]
    ttft_ms = [1e3 * (own[0] - sent_s) for own, sent_s in zip(times, phase["sent_s"], strict=True) if own]
    itl_ms = [1e3 * (after - before) for own in times for before, after in pairwise(own)]
    num_tokens = sum(map(len, phase["output_token_ids"]))
    return {
        "output_tokens": num_tokens,
        "wall_s": phase["wall_s"],
        "tokens_per_s": num_tokens / phase["wall_s"],
        "ttft_p50_ms": percentile(ttft_ms, 0.5),
        "ttft_p99_ms": percentile(ttft_ms, 0.99),
        "itl_p50_ms": percentile(itl_ms, 0.5),
        "itl_p99_ms": percentile(itl_ms, 0.99),
    }


def decode_figures(phase: dict[str, Any], num_prompt_tokens: int) -> dict[str, Any]:
    """Return the time of a step while every request of the phase decodes: from the last first token to the first end.

    ``ms_per_step`` is the median, because compilations slow single steps; ``mean_ms_per_step`` includes them.
    ``context_tokens`` is the mean number of cached tokens of a request in the middle of that time.

    Raises:
        ValueError: no such time exists, or it is too short.
    """
    times: list[list[float]] = phase["token_times_s"]
    begin, end = max(own[0] for own in times), min(own[-1] for own in times)
    steps = [time for time in times[0] if begin <= time <= end]
    if len(steps) < 4:
        raise ValueError(f"only {len(steps)} steps in which all {len(times)} requests decoded")
    gaps = [after - before for before, after in pairwise(steps)]
    middle = (begin + end) / 2
    num_output_tokens = statistics.mean(sum(time <= middle for time in own) for own in times)
    ms_per_step = 1e3 * statistics.median(gaps)
    return {
        "batch": len(times),
        "num_steps": len(gaps),
        "ms_per_step": ms_per_step,
        "mean_ms_per_step": 1e3 * statistics.mean(gaps),
        "tokens_per_s": 1e3 * len(times) / ms_per_step,
        "context_tokens": num_prompt_tokens + num_output_tokens,
        "host_share": _host_share(phase["steps"], len(times), ms_per_step),
    }


def prefill_figures(phase: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Return the median time to the only token of prompts that are sent one after the other."""
    times, sent_s = phase["token_times_s"], phase["sent_s"]
    ms = 1e3 * statistics.median(own[0] - start for own, start in zip(times, sent_s, strict=True))
    return {"num_tokens": num_tokens, "ms": ms, "tokens_per_s": 1e3 * num_tokens / ms}


def _host_share(steps: list[list[Any]], batch: int, ms_per_step: float) -> float | None:
    """Scheduling and taking in results, of a step in which all decode; the fields are those of ``StepStats``."""
    times = [step[4] + step[6] for step in (_padded(step) for step in steps) if not step[1] and step[3] == batch]
    return 1e3 * statistics.median(times) / ms_per_step if times else None


def _padded(step: list[Any]) -> list[Any]:
    return [*step, *[0] * (7 - len(step))]


def standby_figures(measured: dict[str, Any]) -> dict[str, Any]:
    """Return the times from a kill to the next token of each request, and the memory of the standby."""
    seconds = sorted(measured["seconds"])
    return {
        "num_recoveries": len(seconds),
        "p50_s": statistics.median(seconds),
        "greatest_s": seconds[-1],
        "standby_bytes": measured["standby_bytes"],
        "ready_s": measured["ready_s"],
    }


def sleep_figures(level: dict[str, Any]) -> dict[str, Any]:
    """Return the median times of a level, and the memory of a sleeping engine after the second and the last cycle."""
    cycles = level["cycles"]
    medians = {name: statistics.median(row[name] for row in cycles) for name in ("sleep_s", "wake_s", "first_s")}
    asleep = [row["asleep_bytes"] for row in cycles]
    growth = asleep[-1] / asleep[min(1, len(asleep) - 1)] - 1
    return {
        "level": level["level"],
        "is_same": level["is_same"],
        "num_cycles": len(cycles),
        "asleep_bytes": asleep[-1],
        "growth": growth,
        **medians,
    }
