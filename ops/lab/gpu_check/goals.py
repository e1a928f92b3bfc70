"""The goals of the GPU path, and whether the measurements meet them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

MIN_COPY_SHARE = 0.85
MIN_DECODE_SHARE = 0.8
# A step of these takes 0.3 ms of a H200's bandwidth, so launches and the ends of kernels count more.
MIN_SMALL_DECODE_SHARE = {("qwen06", 1): 0.66}
DECODE_BATCHES_WITH_GOALS = (1, 64)
MIN_PREFILL_SHARE = 0.6
MAX_IDLE_SHARE = 0.05
MIN_OVER_RIVAL = 5.0
MIN_OVER_PUBLISHED = 1.1
# Others wake 64 GiB in 3 s, and keep 1.1 GB on a GPU. An 8B model has 16 GB of weights.
MAX_WAKE_S = 1.5
MAX_ASLEEP_GIB = 1.1
MAX_SLEEP_GROWTH = 0.01
MAX_RECOVERY_S = 1.0
# With kernels that an earlier part has compiled.
MAX_READY_S = 3.0
MIN_DETERMINISTIC_SHARE = 0.9


@dataclass(frozen=True, kw_only=True)
class Goal:
    """``value`` is None where it was not measured."""

    what: str
    value: float | None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def state(self) -> str:
        if self.value is None:
            return "not measured"
        is_met = (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )
        return "met" if is_met else "not met"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "state": self.state}


def add_shares(parts: dict[str, Any]) -> None:
    """Put into the engine's figures which share of the measured roofline they are, and into a variant's how many times
    the tokens they are of the engine without its option; None where that is not known."""
    roofline = (parts.get("kernels") or {}).get("roofline")
    for name, part in parts.items():
        kind, _, rest = name.partition(" ")
        shape, _, variant = rest.partition(" ")
        if kind != "engine":
            continue
        plain = {row["batch"]: row["tokens_per_s"] for row in _plain_rows(parts, shape)}
        for row in part.get("decode") or []:
            if variant:
                plain_rate = plain.get(row["batch"])
                row["over_plain"] = row["tokens_per_s"] / plain_rate if plain_rate else None
            bound_ms = row["bytes_per_step"] / roofline["copy_gb_per_s"] * 1e-6 if roofline else None
            row["share_of_bandwidth"] = bound_ms / row["ms_per_step"] if bound_ms else None
        prefill = part.get("prefill")
        if prefill:
            bound_ms = prefill["flop"] / roofline["matmul_tflop_per_s"] * 1e-9 if roofline else None
            prefill["share_of_matmul"] = bound_ms / prefill["ms"] if bound_ms else None


def _plain_rows(parts: dict[str, Any], shape: str) -> list[dict[str, Any]]:
    return (parts.get(f"engine {shape}") or {}).get("decode") or []


def find_goals(parts: dict[str, Any], kernels: tuple[str, ...], shapes: tuple[str, ...]) -> Iterator[Goal]:
    """Yield all goals, including those without a measurement. Call ``add_shares`` before."""
    yield Goal(what="kernels' tests on the device that fail", value=_num_failed(parts), at_most=0)
    rows = (parts.get("kernels") or {}).get("rows") or []
    for kernel in kernels:
        yield from _kernel_goal(kernel, [row for row in rows if row["kernel"] == kernel], parts)
    for shape in shapes:
        yield from _engine_goals(shape, parts)
    yield from _field_goals(parts)
    yield from _deterministic_goals(shapes[0], parts)
    standby = parts.get(f"standby {shapes[0]}") or {}
    what = f"{shapes[0]}, seconds from a kill to the next token with a standby"
    yield Goal(what=what, value=standby.get("greatest_s"), at_most=MAX_RECOVERY_S)
    what = f"{shapes[0]}, seconds until an engine serves"
    yield Goal(what=what, value=standby.get("ready_s"), at_most=MAX_READY_S)
    yield from _sleep_goals(shapes[-1], parts)


def _num_failed(parts: dict[str, Any]) -> int | None:
    """Return the number of kernels' tests that failed; None unless all groups have run to their end."""
    groups = {name: part for name, part in parts.items() if name.startswith("correctness")}
    num_failed = sum(part.get("failed") or 0 for part in groups.values())
    if num_failed:
        return num_failed
    num_groups = max((int(name.rpartition(" ")[2]) for name in groups), default=0)
    is_whole = len(groups) == num_groups > 0 and not any(part["error"] for part in groups.values())
    return 0 if is_whole else None


def _field_goals(parts: dict[str, Any]) -> Iterator[Goal]:
    for name, part in parts.items():
        for row in part.get("field") or []:
            if row["published"]:
                what = f"{name}, {row['concurrency']} requests: tokens/s over vLLM's published on an H100"
                yield Goal(what=what, value=row["tokens_per_s"] / row["published"], at_least=MIN_OVER_PUBLISHED)


def _deterministic_goals(shape: str, parts: dict[str, Any]) -> Iterator[Goal]:
    rows = (parts.get(f"engine {shape} deterministic") or {}).get("decode") or []
    over_plain = {row["batch"]: row["over_plain"] for row in rows}
    for batch in DECODE_BATCHES_WITH_GOALS:
        what = f"{shape}, deterministic at batch {batch}: tokens/s over plain"
        yield Goal(what=what, value=over_plain.get(batch), at_least=MIN_DETERMINISTIC_SHARE)


def _kernel_goal(kernel: str, rows: list[dict[str, Any]], parts: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goal of a kernel's largest memory-bound case, if any; smaller ones take as long as their launch."""
    roofline = (parts.get("kernels") or {}).get("roofline")
    timed = [row for row in rows if row["error"] is None]
    what = f"{kernel}: share of the copy's bandwidth"
    if roofline is None or not timed:
        yield Goal(what=what, value=None, at_least=MIN_COPY_SHARE)
        return
    bound = [
        row
        for row in timed
        if row["num_bytes"] / roofline["copy_gb_per_s"] * 1e-3
        >= row["num_flop"] / roofline["matmul_tflop_per_s"] * 1e-6
    ]
    if bound:
        largest = max(bound, key=lambda row: row["num_bytes"])
        yield Goal(what=f"{what}, {largest['shape']}", value=largest["share"], at_least=MIN_COPY_SHARE)


def _sleep_goals(shape: str, parts: dict[str, Any]) -> Iterator[Goal]:
    levels = {row["level"]: row for row in (parts.get(f"sleep {shape}") or {}).get("levels") or []}
    wake_s = levels[1]["wake_s"] if 1 in levels else None
    yield Goal(what=f"{shape}, seconds to wake from host memory", value=wake_s, at_most=MAX_WAKE_S)
    for level in (1, 2):
        row = levels.get(level)
        asleep = row["asleep_bytes"] / 2**30 if row is not None else None
        yield Goal(what=f"{shape}, GiB of the device asleep at level {level}", value=asleep, at_most=MAX_ASLEEP_GIB)
        growth = row["growth"] if row is not None else None
        yield Goal(
            what=f"{shape}, growth of that over all sleeps at level {level}", value=growth, at_most=MAX_SLEEP_GROWTH
        )
        same = float(row["is_same"]) if row is not None else None
        yield Goal(what=f"{shape}, same tokens after level {level}", value=same, at_least=1.0)


def _engine_goals(shape: str, parts: dict[str, Any]) -> Iterator[Goal]:
    part = parts.get(f"engine {shape}") or {}
    decode = {row["batch"]: row for row in part.get("decode") or []}
    for batch in DECODE_BATCHES_WITH_GOALS:
        share = decode.get(batch, {}).get("share_of_bandwidth")
        at_least = MIN_SMALL_DECODE_SHARE.get((shape, batch), MIN_DECODE_SHARE)
        yield Goal(what=f"{shape}, decode at batch {batch}: share of bandwidth", value=share, at_least=at_least)
    share = (part.get("prefill") or {}).get("share_of_matmul")
    yield Goal(what=f"{shape}, prefill: share of the matmul rate", value=share, at_least=MIN_PREFILL_SHARE)
    idle = part.get("device_idle_share")
    yield Goal(what=f"{shape}, batch 64: share of time in which the device idles", value=idle, at_most=MAX_IDLE_SHARE)
    ours, rival = (
        ((parts.get(f"{name} {shape}") or {}).get("mixed") or {}).get("tokens_per_s")
        for name in ("engine", "transformers")
    )
    ratio = ours / rival if ours and rival else None
    yield Goal(what=f"{shape}, mixed: tokens/s over transformers continuous", value=ratio, at_least=MIN_OVER_RIVAL)
