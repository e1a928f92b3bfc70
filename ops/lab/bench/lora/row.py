"""Cost of adapters, ours and vLLM's: the same requests without any, all with one, and with eight in turn.

Before timing, a few requests of each side in float32 are compared with transformers; those with an adapter with a model
that has it merged. Timed phases have adapters in all requests or in none. Mixed batches are checked as well, and errors
are reported.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from .....shared.errors import ConfigurationError
from ..engines.judge import Claim, ask_truth, judge, read_vocab_size, wrong_lengths
from ..engines.sides import EngineAlone, PeerScript, Side, vllm_environment
from ..result import SideRun, median_ratio
from ..workload import CHECKED_OUTPUT_TOKENS, WARM_UP, Item, Phase, make_workload
from .folders import adapter_folder, merged_folder

NUM_ADAPTERS = 8
# Of the requests that are checked: of the base, and of as many adapters.
NUM_MERGED = 2
NONE, ONE, EIGHT = "none", "one", "eight in turn"
BASE_ALONE, ADAPTERS_ALONE, MIXED = "base alone", "adapters alone", "mixed"
PHASES = (NONE, ONE, EIGHT)
WARM_UP_TOKENS = 4
OURS, VLLM = "Penstock, engine alone", "vLLM offline"
MAKE_TIMEOUT_S = 600.0


class LoraSide(msgspec.Struct, kw_only=True):
    """Results of an engine. ``off`` has tokens/s by round without adapter support; ``on`` the same by phase with it.

    ``wrong_mixed`` describes errors when requests with and without adapters share a batch.
    """

    name: str
    missing: str = ""
    wrong: str = ""
    wrong_mixed: str = ""
    versions: dict[str, str] = {}
    off: list[float] = []
    on: dict[str, list[float]] = {}

    def ratio(self, phase: str) -> float | None:
        """Over the engine that takes none, the median of the rounds; None where it was not measured."""
        if self.wrong or not self.on.get(phase):
            return None
        return median_ratio(self.on[phase], self.off)


class LoraRow(msgspec.Struct, kw_only=True):
    """All engines on one model."""

    model: str
    dtype: str
    rounds: int
    num_requests: int
    sides: list[LoraSide]

    def side(self, name: str) -> LoraSide | None:
        return next((side for side in self.sides if side.name == name), None)

    def over_vllm(self, phase: str) -> float | None:
        """Our tokens/s over vLLM's, the median of the rounds; None where one was not measured."""
        ours, rival = self.side(OURS), self.side(VLLM)
        if ours is None or rival is None or ours.wrong or rival.wrong or not (ours.on and rival.on):
            return None
        return median_ratio(ours.on[phase], rival.on[phase])


class Engine(NamedTuple):
    """An engine in its two forms: without adapters, and with room for all of them."""

    name: str
    off: Side
    on: Side


def choose_engines(peers: frozenset[str], peers_folder: Path, options: list[str]) -> list[Engine]:
    """Ours, and vLLM if it is among ``peers``; ``options`` of ``worker start``."""
    room = ["--enable-lora", "--max-loras", str(NUM_ADAPTERS)]
    engines = [Engine(OURS, EngineAlone(options), EngineAlone([*options, *room]))]
    if "vllm" in peers:
        folder = peers_folder.absolute() / "vllm"
        # The script makes room for the adapters that its workload names.
        script = PeerScript(VLLM, "vllm_offline.py", folder, lambda: vllm_environment(folder))
        engines.append(Engine(VLLM, script, script))
    return engines


def measure_lora(
    name: str,
    model: Path,
    engines: list[Engine],
    *,
    num_requests: int,
    rounds: int,
    seed: int,
    dtype: str,
    scratch: Path,
    tell: Callable[[str], None],
) -> LoraRow:
    """Check all engines, then time the correct ones, in alternating rounds.

    Raises:
        ConfigurationError: the adapters could not be created.
    """
    adapters = scratch / f"{name}-adapters"
    _make_adapters(model, adapters)
    vocab_size = read_vocab_size(model)
    sides = [LoraSide(name=engine.name, missing=engine.off.why_missing) for engine in engines]
    checked = _checked_items(vocab_size, seed, adapters)
    for engine, side in zip(engines, sides, strict=True):
        if not side.missing:
            tell(f"checking {engine.name} …")
            side.wrong, side.wrong_mixed = _token_errors(engine, model, checked, adapters, scratch)
    items = make_workload(num_requests, vocab_size, seed)
    off, on = off_phases(items), on_phases(items, adapters)
    for number in range(rounds):
        pairs = list(zip(engines, sides, strict=True))
        # Every other round in reverse order, so that the order does not always favour the same side.
        for engine, side in pairs if number % 2 == 0 else pairs[::-1]:
            if not side.missing and not side.wrong:
                tell(f"{name}, round {number + 1} of {rounds}: {engine.name} …")
                side.wrong = _time(engine, side, model, off, on, dtype, scratch)
    return LoraRow(model=name, dtype=dtype, rounds=rounds, num_requests=num_requests, sides=sides)


def _make_adapters(model: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "penstock.ops.lab.bench.lora.make", "--model", str(model), "--out", str(folder)]
    command += ["--number", str(NUM_ADAPTERS), "--merged", str(NUM_MERGED)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_TIMEOUT_S, check=False)
    if completed.returncode != 0:
        raise ConfigurationError(f"the adapters could not be made: {completed.stderr.strip()[-1500:]}")


def _with(item: Item, adapters: Path, number: int, max_tokens: int = 0) -> Item:
    folder = str(adapter_folder(adapters, number))
    return msgspec.structs.replace(item, adapter=folder, max_tokens=max_tokens or item.max_tokens)


def off_phases(items: list[Item]) -> list[Phase]:
    """Return the phases of the base model alone."""
    warm_up = [msgspec.structs.replace(item, max_tokens=WARM_UP_TOKENS) for item in items[:NUM_ADAPTERS]]
    return [Phase(WARM_UP, warm_up, NUM_ADAPTERS), Phase(NONE, items, len(items))]


def on_phases(items: list[Item], adapters: Path) -> list[Phase]:
    """Return phases that load each adapter, and run the same requests without, with the first, and with all in turn."""
    first = (items * NUM_ADAPTERS)[:NUM_ADAPTERS]
    warm_up = [_with(item, adapters, number, WARM_UP_TOKENS) for number, item in enumerate(first)]
    eight = [_with(item, adapters, number % NUM_ADAPTERS) for number, item in enumerate(items)]
    by_phase = {NONE: items, ONE: [_with(item, adapters, 0) for item in items], EIGHT: eight}
    timed = [Phase(name, of_phase, len(items)) for name, of_phase in by_phase.items()]
    return [Phase(WARM_UP, warm_up, NUM_ADAPTERS), *timed]


def _checked_items(vocab_size: int, seed: int, adapters: Path) -> list[Item]:
    """Return one request without an adapter, and one with each merged adapter."""
    items = [
        msgspec.structs.replace(item, max_tokens=CHECKED_OUTPUT_TOKENS)
        for item in make_workload(1 + NUM_MERGED, vocab_size, seed)
    ]
    return [items[0], *(_with(item, adapters, number) for number, item in enumerate(items[1:]))]


def _token_errors(engine: Engine, model: Path, items: list[Item], adapters: Path, scratch: Path) -> tuple[str, str]:
    """Return the errors of an engine's tokens in float32, for either kind alone and for both mixed; "" for none."""
    phases = [Phase(BASE_ALONE, items[:1], 1), Phase(ADAPTERS_ALONE, items[1:], len(items) - 1)]
    phases.append(Phase(MIXED, items, len(items)))
    try:
        run = engine.on.run(model, phases, "float32", scratch)
    except ConfigurationError as error:
        return str(error), ""
    alone = [output for name in (BASE_ALONE, ADAPTERS_ALONE) for output in run.phase(name).output_token_ids]
    outputs = {"alone": alone, MIXED: run.phase(MIXED).output_token_ids}
    wrong = {name: wrong_lengths(items, of_kind) for name, of_kind in outputs.items()}
    models = [model, *(merged_folder(adapters, number) for number in range(NUM_MERGED))]
    for number, (folder, item) in enumerate(zip(models, items, strict=True)):
        claims = {name: [Claim(0, of_kind[number])] for name, of_kind in outputs.items() if not wrong[name]}
        truth = ask_truth(folder, [item], claims, scratch, generates=True)
        of = "without an adapter" if number == 0 else f"with adapter {number - 1}"
        for name, of_kind in claims.items():
            if error := judge(of_kind, truth.gaps[name], truth.tokens, "float32").wrong:
                wrong[name] = f"{of}: {error}"
    return wrong["alone"], wrong[MIXED]


def _time(
    engine: Engine, side: LoraSide, model: Path, off: list[Phase], on: list[Phase], dtype: str, scratch: Path
) -> str:
    """Run an engine without and with adapter support, and add the results; return an error, or ""."""
    try:
        without = engine.off.run(model, off, dtype, scratch)
        with_adapters = engine.on.run(model, on, dtype, scratch)
    except ConfigurationError as error:
        return str(error)
    for run, phases in ((without, off), (with_adapters, on)):
        for phase in phases:
            if wrong := wrong_lengths(phase.items, run.phase(phase.name).output_token_ids):
                return wrong
    side.versions = with_adapters.versions or side.versions
    side.off.append(_rate(without, NONE))
    for phase in PHASES:
        side.on.setdefault(phase, []).append(_rate(with_adapters, phase))
    return ""


def _rate(run: SideRun, phase: str) -> float:
    return run.phase(phase).tokens_per_s
