"""The phases that the engine and its rival compute: seeded random token ids, exact output lengths."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from .plan import FieldWorkload, Plan

SEED = 0
WARM_UP, PREFILL, MIXED, GAP = "warm-up", "prefill", "mixed", "gap"
# Short, so that nearly all its steps decode and the profile stays small.
_GAP_PROMPT_TOKENS = 8


def decode_phase_name(batch: int) -> str:
    return f"decode {batch}"


def field_phase_name(concurrency: int) -> str:
    return f"field {concurrency}"


def write_engine_workload(plan: Plan, vocab_size: int, path: Path) -> None:
    """Write all phases. The mixed one runs twice, so that compilation for new shapes is not measured."""
    phases = [
        _phase(decode_phase_name(batch), [(plan.decode_prompt_tokens, plan.decode_tokens)] * batch, batch, vocab_size)
        for batch in plan.batches
    ]
    phases.append(_phase(PREFILL, [(plan.prefill_tokens, 1)] * plan.num_prefills, 1, vocab_size))
    phases += _mixed_phases(plan, vocab_size)
    if plan.gap_batch:
        lengths = [(_GAP_PROMPT_TOKENS, plan.gap_tokens)] * plan.gap_batch
        gap = _phase(GAP, lengths, plan.gap_batch, vocab_size)
        # Last, because the profiler is most likely to fail; and once before, for compilation.
        phases += [{**gap, "name": WARM_UP}, {**gap, "observes_device": True}]
    _write_phases(phases, path)


def write_field_workload(work: FieldWorkload, vocab_size: int, path: Path) -> None:
    """Write a phase per concurrency, after one in which the engine compiles for them."""
    phases = [_phase(WARM_UP, [(work.prompt_tokens, 8)] * max(work.concurrencies), max(work.concurrencies), vocab_size)]
    for concurrency in work.concurrencies:
        lengths = [(work.prompt_tokens, work.output_tokens)] * concurrency
        phases.append(_phase(field_phase_name(concurrency), lengths, concurrency, vocab_size))
    _write_phases(phases, path)


def write_rival_workload(plan: Plan, vocab_size: int, path: Path) -> None:
    """Write only the mixed phase."""
    _write_phases(_mixed_phases(plan, vocab_size), path)


def _mixed_phases(plan: Plan, vocab_size: int) -> list[dict[str, Any]]:
    if not plan.num_mixed:
        return []
    random = Random(SEED)
    lengths = [
        (random.randint(*plan.mixed_prompt_tokens), random.randint(*plan.mixed_output_tokens))
        for _ in range(plan.num_mixed)
    ]
    warm_up = _phase(WARM_UP, lengths[: max(1, plan.num_mixed // 4)], plan.num_mixed, vocab_size)
    return [warm_up, _phase(MIXED, lengths, plan.num_mixed, vocab_size)]


def _phase(name: str, lengths: list[tuple[int, int]], concurrency: int, vocab_size: int) -> dict[str, Any]:
    random = Random(f"{SEED} {name}")
    requests = [
        {
            "prompt_token_ids": [random.randrange(8, vocab_size) for _ in range(num_prompt_tokens)],
            "sampling_params": {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True},
            "arrival_s": 0.0,
        }
        for num_prompt_tokens, max_tokens in lengths
    ]
    return {"name": name, "concurrency": concurrency, "requests": requests}


def _write_phases(phases: list[dict[str, Any]], path: Path) -> None:
    path.write_text(json.dumps({"phases": phases}))
