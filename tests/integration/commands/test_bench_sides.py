"""A rival's script and ours on one workload, for real, and the reference that judges them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from penstock.ops.lab import random_model
from penstock.ops.lab.bench.command import PEERS, chosen_peers
from penstock.ops.lab.bench.engines.growth import measure_growth
from penstock.ops.lab.bench.engines.judge import Claim, ask_truth, judge, wrong_lengths
from penstock.ops.lab.bench.engines.sides import (
    ALONE,
    VLLM_OFFLINE,
    EngineAlone,
    PeerScript,
    choose_sides,
    named_sides,
)
from penstock.ops.lab.bench.queue.follow import measure_follow
from penstock.ops.lab.bench.result import SideRun
from penstock.ops.lab.bench.workload import CHECK, Item, Phase
from penstock.shared.errors import ConfigurationError
from penstock.shared.process.command_line import UsageError

# The second waits for the first's end.
PHASES = [Phase(CHECK, [Item([5, 6, 7, 8, 9], 4), Item([10, 11], 6)], 1)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shape of the benchmark's kind, made small."""
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(random_model.SHAPES, "small", small_llama)
        random_model.write_random_model("small", folder)
    return folder


def small_llama() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
    )


@pytest.mark.usefixtures("warm_python")
def test_a_rival_runs_the_workload_and_is_judged(model: Path, tmp_path: Path) -> None:
    rival = PeerScript("rival", "transformers_static.py", options=("--threads", "1"))
    run = rival.run(model, PHASES, "float32", tmp_path)
    assert_is_whole(run)
    assert run.versions.keys() == {"torch", "transformers"}

    items, outputs = PHASES[0].items, run.phase(CHECK).output_token_ids
    claims = {"rival": [Claim(i, token_ids) for i, token_ids in enumerate(outputs)], "liar": [Claim(0, [1, 2, 3, 4])]}
    truth = ask_truth(model, items, claims, tmp_path, generates=True)
    # A model that says one token for ever would prove nothing of an engine.
    assert all(len(set(token_ids)) > 1 for token_ids in truth.tokens)
    verdict = judge(claims["rival"], truth.gaps["rival"], truth.tokens, "float32")
    assert (verdict.wrong, verdict.num_identical) == ("", 2)
    assert judge(claims["liar"], truth.gaps["liar"], truth.tokens, "float32").wrong


def test_ours_runs_the_same_workload(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammar libraries are loaded on the first request with a grammar, so a start imports none of them."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    assert_is_whole(EngineAlone(["--threads", "1"]).run(model, PHASES, "float32", tmp_path))
    lines = (tmp_path / "words.txt").read_text().splitlines()
    imports = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "penstock.worker.engine.composition" in imports
    assert not {"xgrammar", "llguidance"} & imports


def assert_is_whole(run: SideRun) -> None:
    phase = run.phase(CHECK)
    assert wrong_lengths(PHASES[0].items, phase.output_token_ids) == ""
    assert [len(times) for times in phase.token_times_s] == [4, 6]
    assert phase.sent_s[0] <= phase.token_times_s[0][-1] <= phase.sent_s[1] <= phase.token_times_s[1][0]
    assert phase.token_times_s[1][-1] <= phase.wall_s
    assert run.ready_s > 0
    assert run.peak_rss_bytes >= run.rss_bytes > 1 << 20


@pytest.mark.usefixtures("warm_python")
def test_growth(model: Path, tmp_path: Path) -> None:
    row = measure_growth("small", model, ["--threads", "1"], tmp_path, sizes=(1, 4), num_queued=8)
    assert [size.num_running for size in row.sizes] == [1, 4]
    assert all(size.num_steps > 0 and size.scheduler_us_per_request > 0 for size in row.sizes)


def test_one_client_follows_many_streams() -> None:
    row = measure_follow(num_streams=20, deltas_per_stream=5)
    assert row.num_deltas == 100
    assert row.deltas_per_s > 0


@pytest.mark.usefixtures("warm_python")
def test_a_failed_side_reports_the_reason(tmp_path: Path) -> None:
    side = PeerScript("rival", "transformers_static.py")
    with pytest.raises(ConfigurationError, match="no-such-model"):
        side.run(tmp_path / "no-such-model", PHASES, "float32", tmp_path)


def test_a_rival_that_is_not_installed_is_reported_as_missing(tmp_path: Path) -> None:
    missing = {side.name: side.why_missing for side in choose_sides(frozenset(PEERS), tmp_path, [])}
    assert [name for name, why in missing.items() if why] == [
        "vLLM offline",
        "vLLM in-process async",
        "vLLM HTTP server",
        "llama.cpp",
        "llama.cpp, Q8_0",
        "llama.cpp, Q4_K_M",
        "llama.cpp, Q4_0",
    ]


def test_sides_are_chosen_by_name(tmp_path: Path) -> None:
    sides = choose_sides(frozenset(PEERS), tmp_path, [])
    assert named_sides(sides, []) == sides
    assert [side.name for side in named_sides(sides, [VLLM_OFFLINE, ALONE])] == [VLLM_OFFLINE, ALONE]
    with pytest.raises(ConfigurationError, match="--sides has 'vllm'; choose from Penstock, engine alone; "):
        named_sides(sides, ["vllm"])


def test_rivals_are_chosen_by_name() -> None:
    assert chosen_peers("") == set(PEERS)
    assert chosen_peers("none") == set()
    assert chosen_peers("llama, vllm") == {"llama", "vllm"}
    with pytest.raises(UsageError, match="got 'sglang'"):
        chosen_peers("vllm,sglang")
