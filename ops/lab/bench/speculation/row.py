"""Gain of speculation: each engine without and with drafts, on known answers.

Single requests copy a list, write JSON by a schema, and write prose; then 16 run concurrently. The model has been
trained on its answers (``learn.py``), so every token is checked: a side with any other token has no speed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from .....shared.errors import ConfigurationError
from ..result import SideRun, median_ratio
from ..workload import WARM_UP, Item, Phase
from .sides import WITH, WITHOUT, Pair
from .texts import KINDS, Exercise, all_exercises

MANY = "16 at once"
NUM_AT_ONCE = 16
PHASES = (*KINDS, MANY)
WARM_UP_TOKENS = 12
LEARN_TIMEOUT_S = 1200.0


class PairRow(msgspec.Struct, kw_only=True):
    """Results of one engine, by phase and round: tokens/s without and with drafts, numbers of drafts and accepted ones.

    ``off_cpu_s`` and ``on_cpu_s`` are the CPU time of all rounds, if the engine reports it.
    """

    name: str
    missing: str = ""
    wrong: str = ""
    versions: dict[str, str] = {}
    off: dict[str, list[float]] = {}
    on: dict[str, list[float]] = {}
    num_guessed: dict[str, int] = {}
    num_right: dict[str, int] = {}
    off_cpu_s: dict[str, float] = {}
    on_cpu_s: dict[str, float] = {}

    def ratio(self, phase: str) -> float | None:
        """Tokens/s with guesses over those without, round by round; the median. None where it was not measured."""
        if self.wrong or not self.on.get(phase):
            return None
        return median_ratio(self.on[phase], self.off[phase])

    def cpu_ratio(self, phase: str) -> float | None:
        """Return tokens per CPU second with drafts over those without, less affected by other load; None if unknown."""
        if self.wrong or not self.on_cpu_s.get(phase) or not self.off_cpu_s.get(phase):
            return None
        return self.off_cpu_s[phase] / self.on_cpu_s[phase]


class SpeculationRow(msgspec.Struct, kw_only=True):
    """All engines on one model; ``num_tokens`` are those of the answers of a phase."""

    model: str
    rounds: int
    num_tokens: dict[str, int]
    pairs: list[PairRow]


def learn_answers(model: Path) -> None:
    """Have the random model in ``model`` know the answers.

    Raises:
        ConfigurationError: it could not learn them; the message has its last words.
    """
    command = [sys.executable, "-m", "penstock.ops.lab.bench.speculation.learn", "--model", str(model)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=LEARN_TIMEOUT_S, check=False)
    if completed.returncode != 0:
        raise ConfigurationError(f"the answers could not be learnt: {completed.stderr.strip()[-1500:]}")


def measure_speculation(
    name: str, model: Path, pairs: list[Pair], rounds: int, scratch: Path, tell: Callable[[str], None]
) -> SpeculationRow:
    """Measure ``rounds`` of all pairs on a model that knows its answers."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    phases, answers = make_phases(tokenizer)
    rows = [PairRow(name=pair.name, missing=pair.why_missing) for pair in pairs]
    for number in range(rounds):
        for pair, row in zip(pairs, rows, strict=True):
            if not row.missing and not row.wrong:
                tell(f"round {number + 1} of {rounds}: {pair.name} …")
                _run_pair(pair, number, row, model, phases if pair.is_batching else phases[:-1], answers, scratch)
    num_tokens = {phase: sum(map(len, of_phase)) for phase, of_phase in answers.items()}
    return SpeculationRow(model=name, rounds=rounds, num_tokens=num_tokens, pairs=rows)


def make_phases(tokenizer: Tokenizer) -> tuple[list[Phase], dict[str, list[list[int]]]]:
    """Return the phases, the first for warm-up, and the tokens of each answer of the others."""
    questions = all_exercises()
    groups = {kind: [one for one in questions if one.kind == kind] for kind in KINDS}
    groups[MANY] = (questions + questions)[:NUM_AT_ONCE]
    firsts = [group[0] for group in groups.values()]
    warm_up = [msgspec.structs.replace(_item(tokenizer, one), max_tokens=WARM_UP_TOKENS) for one in firsts]
    phases = [Phase(WARM_UP, warm_up, 1)]
    for name, group in groups.items():
        items = [_item(tokenizer, one) for one in group]
        phases.append(Phase(name, items, NUM_AT_ONCE if name == MANY else 1))
    answers = {name: [tokenizer.encode(one.answer).ids for one in group] for name, group in groups.items()}
    return phases, answers


def _item(tokenizer: Tokenizer, exercise: Exercise) -> Item:
    num_tokens = len(tokenizer.encode(exercise.answer).ids)
    grammar = None if exercise.schema is None else {"json": exercise.schema}
    return Item(tokenizer.encode(exercise.prompt).ids, num_tokens, grammar=grammar)


def _run_pair(
    pair: Pair,
    number: int,
    row: PairRow,
    model: Path,
    phases: list[Phase],
    answers: dict[str, list[list[int]]],
    scratch: Path,
) -> None:
    """Run ``pair`` for a round, and add its results to ``row``, or the reason why it does not count."""
    try:
        off, on = pair.run(model, phases, number, scratch)
    except ConfigurationError as error:
        row.wrong = str(error)
        return
    row.versions = on.versions or row.versions
    for name in [phase.name for phase in phases[1:]]:
        for way, run, rates, cpu_s in ((WITHOUT, off, row.off, row.off_cpu_s), (WITH, on, row.on, row.on_cpu_s)):
            row.wrong = row.wrong or wrong_answers(f"{pair.name}, {way}", run, name, answers[name])
            result = run.phase(name)
            rates.setdefault(name, []).append(result.tokens_per_s)
            cpu_s[name] = cpu_s.get(name, 0.0) + result.cpu_s
        guessed = on.phase(name)
        row.num_guessed[name] = row.num_guessed.get(name, 0) + guessed.num_draft_tokens
        row.num_right[name] = row.num_right.get(name, 0) + guessed.num_accepted_tokens


def wrong_answers(side: str, run: SideRun, phase: str, answers: list[list[int]]) -> str:
    """Return the errors in the tokens of a phase; "" for none."""
    for number, (output, right) in enumerate(zip(run.phase(phase).output_token_ids, answers, strict=True)):
        if output != right:
            num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(output, right, strict=False)))
            return f"{side}: answer {number + 1} of {phase} is wrong from token {num_right + 1} on"
    return ""
