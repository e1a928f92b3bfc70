"""The engines, each without and with drafts from the text."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from .....shared.errors import ConfigurationError
from ..engines.sides import EngineAlone, PeerScript, Side, vllm_environment
from ..result import PhaseResult, SideRun
from ..workload import Phase

NUM_RIVAL_GUESSES = 5  # vLLM's documentation has 5 with its n-gram
LLAMA_GUESSES = 10  # the default of llama-cpp-python's prompt lookup
DTYPE = "bfloat16"

WITHOUT, WITH = "without guesses", "with guesses"


class Pair(Protocol):
    """An engine without and with drafts.

    Attributes:
        is_batching: whether it runs several requests concurrently.
        why_missing: reason why it cannot be run; empty if it can.
    """

    name: str
    is_batching: bool

    @property
    def why_missing(self) -> str: ...

    def run(self, model: Path, phases: list[Phase], number: int, scratch: Path) -> tuple[SideRun, SideRun]:
        """Run all phases without and with drafts; the first phase is for warm-up. The round ``number`` decides which of
        the two is first.

        Raises:
            ConfigurationError: one of the two failed; the message names it and contains its last output.
        """
        ...


class InTurns:
    """Our engine alone, without Redis: one process generates each answer once without and once with drafts, in turn.

    So differences between processes, several percent of their speed, do not count. Nor does the cost of enabled but
    unused speculation, which is none (ops/decisions/speculation.md).
    """

    is_batching = True
    why_missing = ""

    def __init__(self, speculative: str, engine_options: list[str]) -> None:
        self.name = f"Penstock, {speculative}"
        self._engine = EngineAlone([*engine_options, "--speculative", speculative], self.name)

    def run(self, model: Path, phases: list[Phase], number: int, scratch: Path) -> tuple[SideRun, SideRun]:
        run = _run_side(self._engine, model, turns_of(phases, number), scratch)
        return _part_of(run, phases, WITHOUT), _part_of(run, phases, WITH)


def _run_side(side: Side, model: Path, phases: list[Phase], scratch: Path) -> SideRun:
    try:
        return side.run(model, phases, DTYPE, scratch)
    except ConfigurationError as error:
        raise ConfigurationError(f"{side.name}: {error}") from error


def turns_of(phases: list[Phase], number: int) -> list[Phase]:
    """Return phases that alternate between without and with drafts, in groups of concurrent answers; warm-up first."""
    turns = phases[:1]
    for phase in phases[1:]:
        for start in range(0, len(phase.items), phase.concurrency):
            items = phase.items[start : start + phase.concurrency]
            for way in (WITHOUT, WITH) if number % 2 == 0 else (WITH, WITHOUT):
                name = _turn(phase.name, way)
                turns.append(Phase(name, items, phase.concurrency, is_guessing=way == WITH, is_fresh=True))
            number += 1  # the next begins with the other
    return turns


def _turn(phase: str, way: str) -> str:
    return f"{phase}, {way}"


def _part_of(run: SideRun, phases: list[Phase], way: str) -> SideRun:
    joined = [
        PhaseResult.joined(phase.name, [part for part in run.phases if part.name == _turn(phase.name, way)])
        for phase in phases[1:]
    ]
    return msgspec.structs.replace(run, phases=joined)


class OneAfterTheOther:
    """A rival: a process without guesses and one with them."""

    def __init__(self, off: Side, on: Side, *, is_batching: bool = True) -> None:
        self.name, self.off, self.on, self.is_batching = on.name, off, on, is_batching

    @property
    def why_missing(self) -> str:
        return self.off.why_missing

    def run(self, model: Path, phases: list[Phase], number: int, scratch: Path) -> tuple[SideRun, SideRun]:
        order = (self.off, self.on) if number % 2 == 0 else (self.on, self.off)
        runs = {side: _run_side(side, model, phases, scratch) for side in order}
        return runs[self.off], runs[self.on]


def rivals(peers: frozenset[str], peers_folder: Path) -> list[OneAfterTheOther]:
    """vLLM's n-gram, and the prompt lookup of llama.cpp's Python package."""
    pairs = []
    if "vllm" in peers:
        folder = peers_folder.absolute() / "vllm"
        off, on = (
            PeerScript(name, "vllm_offline.py", folder, lambda: vllm_environment(folder), options)
            for name, options in (
                ("vLLM offline, off", ()),
                ("vLLM offline, ngram", ("--num-guesses", str(NUM_RIVAL_GUESSES))),
            )
        )
        pairs.append(OneAfterTheOther(off, on))
    if "llama" in peers:
        folder = peers_folder.absolute() / "llama"
        off, on = (
            PeerScript(name, "llama_lookup.py", folder, options=options)
            for name, options in (
                ("llama.cpp, off", ()),
                ("llama.cpp, prompt lookup", ("--num-guesses", str(LLAMA_GUESSES))),
            )
        )
        pairs.append(OneAfterTheOther(off, on, is_batching=False))
    return pairs
