"""What guesses save: each engine without and with them, on answers that are known.

One request at a time copies a list, writes JSON by a schema, and writes prose; then 16 are answered at once. The model
has learnt its answers by heart (``learn.py``), so every token can be checked, and is: a side that says anything else
has no speed.
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
from .texts import KINDS, Asked, all_asked

MANY = "16 at once"
NUM_AT_ONCE = 16
PHASES = (*KINDS, MANY)
WARM_UP_TOKENS = 12
LEARN_TIMEOUT_S = 1200.0


class PairRow(msgspec.Struct, kw_only=True):
    """One engine. By phase, in each round: tokens/s without and with guesses, and how many were guessed and right.

    ``off_cpu_s`` and ``on_cpu_s`` are the processor time that the rounds took together, of an engine that tells it.
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
        """Tokens per second of processor time with guesses over those without: what others take of the machine counts
        less. None where it is not told."""
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=LEARN_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise ConfigurationError(f"the answers could not be learnt: {done.stderr.strip()[-1500:]}")


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
    """The phases, of which the first warms up, and the tokens of each answer of the others."""
    asked = all_asked()
    groups = {kind: [one for one in asked if one.kind == kind] for kind in KINDS}
    groups[MANY] = (asked + asked)[:NUM_AT_ONCE]
    firsts = [group[0] for group in groups.values()]
    warm_up = [msgspec.structs.replace(_item(tokenizer, one), max_tokens=WARM_UP_TOKENS) for one in firsts]
    phases = [Phase(WARM_UP, warm_up, 1)]
    for name, group in groups.items():
        items = [_item(tokenizer, one) for one in group]
        phases.append(Phase(name, items, NUM_AT_ONCE if name == MANY else 1))
    answers = {name: [tokenizer.encode(one.answer).ids for one in group] for name, group in groups.items()}
    return phases, answers


def _item(tokenizer: Tokenizer, asked: Asked) -> Item:
    num_tokens = len(tokenizer.encode(asked.answer).ids)
    grammar = None if asked.schema is None else {"json": asked.schema}
    return Item(tokenizer.encode(asked.prompt).ids, num_tokens, grammar=grammar)


def _run_pair(
    pair: Pair,
    number: int,
    row: PairRow,
    model: Path,
    phases: list[Phase],
    answers: dict[str, list[list[int]]],
    scratch: Path,
) -> None:
    """Run ``pair`` for a round, and enter into ``row`` what it gave, or why it counts for nothing."""
    try:
        off, on = pair.run(model, phases, number, scratch)
    except ConfigurationError as error:
        row.wrong = str(error)
        return
    row.versions = on.versions or row.versions
    for name in [phase.name for phase in phases[1:]]:
        for way, run, rates, cpu_s in ((WITHOUT, off, row.off, row.off_cpu_s), (WITH, on, row.on, row.on_cpu_s)):
            row.wrong = row.wrong or wrong_answers(f"{pair.name}, {way}", run, name, answers[name])
            found = run.phase(name)
            rates.setdefault(name, []).append(found.tokens_per_s)
            cpu_s[name] = cpu_s.get(name, 0.0) + found.cpu_s
        guessed = on.phase(name)
        row.num_guessed[name] = row.num_guessed.get(name, 0) + guessed.num_draft_tokens
        row.num_right[name] = row.num_right.get(name, 0) + guessed.num_accepted_tokens


def wrong_answers(side: str, run: SideRun, phase: str, answers: list[list[int]]) -> str:
    """What is wrong with the tokens of a phase; empty if nothing."""
    for number, (said, right) in enumerate(zip(run.phase(phase).output_token_ids, answers, strict=True)):
        if said != right:
            num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(said, right, strict=False)))
            return f"{side}: answer {number + 1} of {phase} is wrong from token {num_right + 1} on"
    return ""
