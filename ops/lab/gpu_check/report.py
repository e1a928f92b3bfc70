"""Results as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def lines_of(name: str, part: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a part."""
    kind = name.split()[0]
    summary = part["error"] or part.get("needs")
    yield f"{name} ({part['seconds']:.0f} s){': ' + summary if summary else ''}"
    if "passed" in part:
        yield f"  {part['passed']} passed, {part['failed']} failed, {part['skipped']} skipped"
        for file in part["files"]:
            for failure in file["failures"]:
                yield f"  {file['file']} {failure['test']}: {failure['reason']}"
    elif kind == "kernels":
        yield from _kernel_lines(part)
    elif kind in ("engine", "transformers"):
        yield from _engine_lines(part)
    elif kind == "field":
        for row in part.get("field") or []:
            published = f", {_ratio(row['tokens_per_s'], row['published'])} of vLLM's" if row["published"] else ""
            yield (
                f"  {row['concurrency']} requests: {row['tokens_per_s']:.0f} tokens/s{published},"
                f" TTFT p50 {_number(row['ttft_p50_ms'], '.0f')} ms, ITL p50 {_number(row['itl_p50_ms'], '.2f')} ms"
            )
    elif kind == "sleep":
        for row in part.get("levels") or []:
            yield (
                f"  level {row['level']}: {row['num_cycles']} sleeps of {row['sleep_s']:.3f} s, wakes of "
                f"{row['wake_s']:.3f} s, {row['asleep_bytes'] / 2**30:.2f} GiB asleep, {row['growth']:+.1%} over all"
                f"{'' if row['is_same'] else ', OTHER TOKENS AFTERWARDS'}"
            )
    elif kind == "standby" and "p50_s" in part:
        yield (
            f"  ready after {part['ready_s']:.1f} s; kill to next token p50 {part['p50_s']:.3f} s, "
            f"greatest of {part['num_recoveries']} {part['greatest_s']:.3f} s; "
            f"the standby takes {part['standby_bytes'] / 2**30:.2f} GiB"
        )


def goal_lines(goals: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of the goals, with their states on the left."""
    for goal in goals:
        limit = f"≥ {goal['at_least']:g}" if goal["at_least"] is not None else f"≤ {goal['at_most']:g}"
        yield f"  {goal['state']:<12}  {_number(goal['value'], '.3g'):>6}  {limit:<7} {goal['what']}"


def _kernel_lines(part: dict[str, Any]) -> Iterator[str]:
    roofline = part.get("roofline")
    if roofline:
        yield f"  copy {roofline['copy_gb_per_s']:.0f} GB/s, matmul {roofline['matmul_tflop_per_s']:.0f} TFLOP/s"
    rows = part.get("rows") or []
    width = max((len(f"{row['kernel']} {row['shape']} {row['dtype']}") for row in rows), default=0)
    for row in rows:
        name = f"{row['kernel']} {row['shape']} {row['dtype']}".ljust(width)
        if row["error"] is not None:
            yield f"  {name}  FAILED: {row['error']}"
            continue
        rates = f"{row['num_bytes'] / row['us'] * 1e-3:8.0f} GB/s {row['num_flop'] / row['us'] * 1e-6:7.1f} TFLOP/s"
        rivals = [f"{rival} {_ratio(us, row['us'])}" for rival, us in (row["rivals_us"] or {}).items()]
        yield f"  {name}  {row['us']:9.1f} us {rates} {row['share']:6.0%}  {', '.join(rivals)}".rstrip()


def _engine_lines(part: dict[str, Any]) -> Iterator[str]:
    yield from (f"  chosen by time: {words}" for words in part.get("kernels_chosen") or ())
    for row in part.get("decode") or []:
        yield (
            f"  decode at batch {row['batch']:>3}: {row['ms_per_step']:.2f} ms/step"
            f" (mean {row['mean_ms_per_step']:.2f}), {row['tokens_per_s']:.0f} tokens/s,"
            f" {_percent(row.get('share_of_bandwidth'))} of the bandwidth bound,"
            f" schedule and update {_percent(row['host_share'])}"
            + (f", {_number(row['over_plain'], '.2f')} times the tokens without" if "over_plain" in row else "")
        )
    prefill = part.get("prefill")
    if prefill:
        yield (
            f"  prefill of {prefill['num_tokens']}: {prefill['ms']:.1f} ms, {prefill['tokens_per_s']:.0f} tokens/s,"
            f" {_percent(prefill.get('share_of_matmul'))} of the matmul rate"
        )
    mixed = part.get("mixed")
    if mixed:
        yield (
            f"  mixed: {mixed['tokens_per_s']:.0f} tokens/s,"
            f" TTFT {_number(mixed['ttft_p50_ms'], '.0f')} / {_number(mixed['ttft_p99_ms'], '.0f')} ms,"
            f" ITL {_number(mixed['itl_p50_ms'], '.2f')} / {_number(mixed['itl_p99_ms'], '.2f')} ms (p50 / p99)"
        )
    if part.get("device_idle_share") is not None:
        yield f"  the device idles {_percent(part['device_idle_share'])} of the time while a batch decodes"


def _ratio(rival_us: float | None, own_us: float) -> str:
    return "failed" if rival_us is None else f"{rival_us / own_us:.2f}"


def _percent(value: float | None) -> str:
    return _number(value, ".0%")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
