"""The requests of the row speculation, and its table and goals of the runs."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from penstock.ops.lab.bench.goals import State
from penstock.ops.lab.bench.result import PhaseResult, SideRun
from penstock.ops.lab.bench.speculation.report import speculation_goals, speculation_table
from penstock.ops.lab.bench.speculation.row import MANY, PHASES, PairRow, SpeculationRow, wrong_answers
from penstock.ops.lab.bench.speculation.sides import rivals, turns_of
from penstock.ops.lab.bench.speculation.texts import COPY, JSON, KINDS, ORDER_SCHEMA, all_exercises
from penstock.ops.lab.bench.workload import WARM_UP, Item, Phase


def test_each_right_answer_is_accepted() -> None:
    exercises = all_exercises()
    assert exercises == all_exercises()
    assert [sum(one.kind == kind for one in exercises) for kind in KINDS] == [4, 4, 4]
    assert len({one.prompt for one in exercises}) == len(exercises)
    for one in exercises:
        if one.kind == COPY:
            before, after = one.prompt.strip().split("\n")[1:], one.answer.split("\n")
            changed = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
            assert len(changed) == 1
            name = one.prompt.removeprefix("The last ").split(" was sold")[0]
            assert changed[0][0].startswith(f"- {name}, ")
            assert changed[0][1] == f"- {name}, none left, order more"
        elif one.kind == JSON:
            order = json.loads(one.answer)
            assert list(order) == ORDER_SCHEMA["required"]
            for item in order["items"]:
                assert list(item) == ORDER_SCHEMA["properties"]["items"]["items"]["required"]
                assert (
                    f"{item['quantity']} {item['colour']} {item['article']} at {item['price_in_cents']}" in one.prompt
                )


def run_of(token_ids: list[list[int]]) -> SideRun:
    phase = PhaseResult(name=COPY, wall_s=1.0, output_token_ids=token_ids, token_times_s=[], sent_s=[])
    return SideRun(ready_s=1.0, rss_bytes=1, peak_rss_bytes=1, phases=[phase])


def test_a_different_answer_is_reported() -> None:
    assert wrong_answers("side", run_of([[1, 2], [3]]), COPY, [[1, 2], [3]]) == ""
    assert wrong_answers("side", run_of([[1, 2], [4]]), COPY, [[1, 2], [3]]) == (
        "side: answer 2 of copying is wrong from token 1 on"
    )
    assert "answer 1 of copying is wrong from token 2" in wrong_answers("side", run_of([[1]]), COPY, [[1, 2]])


def pair(name: str, on: float, missing: str = "", wrong: str = "") -> PairRow:
    phases: list[str] = list(PHASES)
    off, with_guesses = (dict.fromkeys(phases, rates) for rates in ([10.0, 20.0, 10.0], [on, 2 * on, 90.0]))
    counts = dict.fromkeys(phases, 8), dict.fromkeys(phases, 6)
    if missing:
        return PairRow(name=name, missing=missing)
    return PairRow(name=name, wrong=wrong, off=off, on=with_guesses, num_guessed=counts[0], num_right=counts[1])


def test_ratios_are_taken_round_by_round_and_held_against_the_goals() -> None:
    pairs = [pair("Penstock, ngram", 15.0), pair("vLLM offline, ngram", 20.0), pair("llama.cpp", 1.0, "not installed")]
    row = SpeculationRow(model="smol135", rounds=3, num_tokens=dict.fromkeys(PHASES, 100), pairs=pairs)
    goals = list(speculation_goals(row))
    assert [goal.value for goal in goals] == [1.5, 1.5, 1.5, 1.5]
    assert [goal.state for goal in goals] == [State.NOT_MET, State.MET, State.MET, State.MET]
    console = Console(file=io.StringIO(), width=300)
    console.print(speculation_table(row))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "10.0 → 30.0, 1.50 (75% of 8)" in printed
    assert "not installed" in printed
    pairs[0].off_cpu_s, pairs[0].on_cpu_s = dict.fromkeys(PHASES, 9.0), dict.fromkeys(PHASES, 6.0)
    assert [one.cpu_ratio(PHASES[0]) for one in pairs] == [1.5, None, None]


def test_sides_with_different_answers_have_no_speed() -> None:
    row = SpeculationRow(
        model="m", rounds=3, num_tokens=dict.fromkeys(PHASES, 1), pairs=[pair("Penstock, ngram", 50.0, wrong="it lied")]
    )
    assert {goal.state for goal in speculation_goals(row)} == {State.NOT_MEASURED}
    console = Console(file=io.StringIO(), width=300)
    console.print(speculation_table(row))
    assert "it lied" in console.file.getvalue()  # type: ignore[attr-defined]


def test_rivals_run_without_and_with_speculation() -> None:
    names = rivals(frozenset({"vllm", "llama"}), Path("nowhere"))
    assert [(one.off.name, one.on.name) for one in names] == [
        ("vLLM offline, off", "vLLM offline, ngram"),
        ("llama.cpp, off", "llama.cpp, prompt lookup"),
    ]
    assert [one.is_batching for one in names] == [True, False]
    assert {one.why_missing for one in names} == {"not installed"}


def test_ours_gives_each_answer_both_ways_and_begins_with_either() -> None:
    items = [Item([number], 8) for number in range(4)]
    phases = [Phase(WARM_UP, items[:1], 1), Phase(COPY, items[:3], 1), Phase(MANY, items, 4)]
    turns = turns_of(phases, 0)
    assert turns[0] == phases[0]
    assert [[item.prompt_token_ids for item in turn.items] for turn in turns[1::2]] == [
        *([[number]] for number in range(3)),
        [[number] for number in range(4)],
    ]
    assert [turn.is_guessing for turn in turns[1:]] == [False, True, True, False] * 2
    assert [turn.is_guessing for turn in turns_of(phases, 1)[1:]] == [True, False, False, True] * 2
    assert all(turn.is_fresh for turn in turns[1:])


def test_parts_that_ran_one_after_the_other_are_one_phase() -> None:
    parts = [
        PhaseResult(name="a", wall_s=wall_s, output_token_ids=[ids], token_times_s=[[0.5, 1.0]], sent_s=[0.25], cpu_s=1)
        for wall_s, ids in ((2.0, [1, 2]), (4.0, [3, 4]))
    ]
    whole = PhaseResult.joined("b", parts)
    assert (whole.name, whole.wall_s, whole.cpu_s, whole.output_token_ids) == ("b", 6.0, 2.0, [[1, 2], [3, 4]])
    assert whole.token_times_s == [[0.5, 1.0], [2.5, 3.0]]
    assert whole.sent_s == [0.25, 2.25]
    assert whole.ttft_ms == [250.0, 250.0]
