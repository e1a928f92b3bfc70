"""One model on all sides: first whether their tokens are right, then how fast they come, in alternating rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import msgspec

from .....shared.errors import ConfigurationError
from ..result import Figures, SideRun
from ..workload import ALL_AT_ONCE, CHECK, Item, Phase, check_phases, timed_phases
from .judge import Claim, Verdict, ask_truth, judge, read_vocab_size, wrong_lengths
from .quality import LLAMA_DIVERGENCES, Divergence, measure_divergence
from .roofline import decode_bytes
from .sides import Side

# Requests of each timed run whose tokens are also checked, in the timed dtype.
NUM_SAMPLED = 4
# Precisions whose speed is worth nothing without the quality.
QUANTIZED = ("int8", "int4-mixed", "int4")


class SideRow(msgspec.Struct, kw_only=True):
    """A side on one model. It has rounds only if nothing is ``missing`` and nothing ``wrong``.

    ``divergence`` is that of a quantised side; None for other sides.
    """

    name: str
    missing: str = ""
    wrong: str = ""
    checked: Verdict | None = None
    timed: Verdict | None = None
    versions: dict[str, str] = {}
    rounds: list[Figures] = []
    divergence: Divergence | None = None

    @property
    def is_quantized(self) -> bool:
        return self.timed is not None and self.timed.precision in QUANTIZED

    def median(self, figure: str) -> float | None:
        """Return the median of a figure over the rounds; None without rounds."""
        return statistics.median(getattr(r, figure) for r in self.rounds) if self.rounds else None


class EngineRow(msgspec.Struct, kw_only=True):
    """Results for one model. ``dtype`` is that of the timed rounds."""

    model: str
    dtype: str
    num_requests: int
    num_single: int
    seed: int
    decode_bytes: int
    sides: list[SideRow]

    def side(self, name: str) -> SideRow | None:
        return next((side for side in self.sides if side.name == name), None)

    def ratio(self, ours: str, rival: str, figure: str, rival_figure: str = "") -> float | None:
        """Ours over the rival's in each round, the median of the rounds.

        None where one has not been measured, or the rival's is nothing.
        """
        a, b = self.side(ours), self.side(rival)
        if a is None or b is None or not a.rounds or not b.rounds:
            return None
        pairs = [
            (getattr(x, figure), getattr(y, rival_figure or figure)) for x, y in zip(a.rounds, b.rounds, strict=True)
        ]
        return statistics.median(x / y for x, y in pairs) if all(y for _, y in pairs) else None


class EngineWork(msgspec.Struct, kw_only=True, frozen=True):
    """Common options of the rows about engines."""

    num_requests: int
    num_single: int
    rounds: int
    seed: int
    requests_per_s: float = 0.0
    dtype: str = "bfloat16"


def measure_model(
    name: str, model: Path, sides: list[Side], work: EngineWork, scratch: Path, tell: Callable[[str], None]
) -> EngineRow:
    """Check all sides, then time the correct ones. Timed tokens are checked again, in their own dtype."""
    vocab_size = read_vocab_size(model)
    rows = {side.name: SideRow(name=side.name, missing=side.why_missing) for side in sides}
    present = [side for side in sides if not rows[side.name].missing]
    check(model, present, rows, check_phases(vocab_size, work.seed), scratch, tell)
    _measure_quality(model, present, rows, scratch, tell)
    phases = timed_phases(work.num_requests, work.num_single, vocab_size, work.seed, work.requests_per_s)
    runs: dict[str, list[SideRun]] = {side.name: [] for side in present if not rows[side.name].wrong}
    for number in range(work.rounds):
        # Every other round in reverse order, so that the order does not always favour the same side.
        for side in present if number % 2 == 0 else present[::-1]:
            if rows[side.name].wrong:
                continue
            tell(f"{name}, round {number + 1} of {work.rounds}: {side.name} …")
            try:
                runs[side.name].append(side.run(model, phases, work.dtype, scratch))
            except ConfigurationError as error:
                rows[side.name].wrong = str(error)
    precisions = {side.name: side.precision or work.dtype for side in present}
    _judge_timed(model, phases, runs, rows, precisions, scratch)
    for side_name, of_side in runs.items():
        if not rows[side_name].wrong:
            rows[side_name].rounds = [Figures.from_run(run) for run in of_side]
            rows[side_name].versions = of_side[0].versions
    return EngineRow(
        model=name,
        dtype=work.dtype,
        num_requests=work.num_requests,
        num_single=work.num_single,
        seed=work.seed,
        decode_bytes=decode_bytes(model),
        sides=list(rows.values()),
    )


def _measure_quality(
    model: Path, sides: list[Side], rows: dict[str, SideRow], scratch: Path, tell: Callable[[str], None]
) -> None:
    """Measure what quantised sides cost in quality. One of ours that costs more than is allowed is wrong."""
    for side in sides:
        row = rows[side.name]
        if row.wrong or side.precision not in QUANTIZED:
            continue
        if side.name in LLAMA_DIVERGENCES:
            row.divergence = LLAMA_DIVERGENCES[side.name]
            continue
        tell(f"measuring the quality of {side.name} …")
        try:
            row.divergence = measure_divergence(model, side.precision, scratch)
        except ConfigurationError as error:
            row.wrong = str(error)
        else:
            row.wrong = row.divergence.wrong


def check(
    model: Path,
    sides: list[Side],
    rows: dict[str, SideRow],
    phases: list[Phase],
    scratch: Path,
    tell: Callable[[str], None],
) -> None:
    """Have each side do the few requests of ``phases`` in float32, and write its verdict into its row."""
    items = phases[0].items
    outputs: dict[str, list[list[int]]] = {}
    for side in sides:
        tell(f"checking {side.name} …")
        try:
            outputs[side.name] = side.run(model, phases, "float32", scratch).phase(CHECK).output_token_ids
        except ConfigurationError as error:
            rows[side.name].wrong = str(error)
            continue
        rows[side.name].wrong = wrong_lengths(items, outputs[side.name])
    claims = {
        name: [Claim(i, token_ids) for i, token_ids in enumerate(of_side)]
        for name, of_side in outputs.items()
        if not rows[name].wrong
    }
    truth = ask_truth(model, items, claims, scratch, generates=True)
    precisions = {side.name: side.precision or "float32" for side in sides}
    for name, of_side in claims.items():
        verdict = judge(of_side, truth.gaps[name], truth.tokens, precisions[name])
        rows[name].checked, rows[name].wrong = verdict, verdict.wrong


def _judge_timed(
    model: Path,
    phases: list[Phase],
    runs: dict[str, list[SideRun]],
    rows: dict[str, SideRow],
    precisions: dict[str, str],
    scratch: Path,
) -> None:
    """Check the lengths of all timed requests, and the tokens of a few different ones in each round."""
    items: list[Item] = next(phase.items for phase in phases if phase.name == ALL_AT_ONCE)
    claims: dict[str, list[Claim]] = {}
    for name, of_side in runs.items():
        for phase in phases:
            for run in of_side:
                rows[name].wrong = rows[name].wrong or wrong_lengths(
                    phase.items, run.phase(phase.name).output_token_ids
                )
        if not rows[name].wrong:
            claims[name] = [
                Claim(request, run.phase(ALL_AT_ONCE).output_token_ids[request])
                for number, run in enumerate(of_side)
                for request in {(NUM_SAMPLED * number + i) % len(items) for i in range(NUM_SAMPLED)}
            ]
    truth = ask_truth(model, items, claims, scratch, generates=False)
    for name, of_side in claims.items():
        verdict = judge(of_side, truth.gaps[name], truth.tokens, precisions[name])
        rows[name].timed, rows[name].wrong = verdict, verdict.wrong
