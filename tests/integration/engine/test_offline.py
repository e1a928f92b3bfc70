"""The engine alone on a workload file, over a random model of a known shape, both as commands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.ops.lab import random_model
from penstock.shared.errors import PenstockError
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.engine.execution.device_activity import covered_share
from penstock.worker.engine.offline.run import OfflineRequest, Phase, main, run_phases, run_workload

from ...processes import DEADLINE_S
from .harness import generate, request

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


def test_a_workload_file_becomes_tokens_and_figures(
    model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [1, 2, 3]

    def prepare_part(*_: Any) -> bool:
        parts.pop()
        return bool(parts)

    monkeypatch.setattr("penstock.worker.engine.composition.capture_next", prepare_part)
    workload, output = tmp_path / "workload.json", tmp_path / "output.json"
    requests = [
        {"prompt_token_ids": [5, 6, 7], "sampling_params": GREEDY},
        {"prompt_token_ids": [8], "sampling_params": {**GREEDY, "max_tokens": 3}, "arrival_s": 0.05, "priority": 1},
    ]
    workload.write_text(json.dumps({"requests": requests}))
    command = ["--model", str(model_folder("llama")), "--output", str(output)]
    config = tmp_path / "penstock.toml"
    config.write_text(f'threads = 1\nmax_num_seqs = 4\nscheduling_policy = "priority"\nworkload = "{workload}"\n')
    assert main([*command, "--config", str(config)]) == 0
    assert parts == [], "later steps are prepared before the first"
    result = json.loads(output.read_text())
    assert [len(token_ids) for token_ids in result["output_token_ids"]] == [6, 3]
    assert result["output_tokens"] == 9
    assert result["output_tokens_per_s"] == pytest.approx(9 / result["wall_s"])
    assert 0 < result["ttft_p50_ms"] <= result["ttft_p99_ms"]
    assert 0 < result["itl_p50_ms"] <= result["itl_p99_ms"]
    assert result["load_s"] > 0
    assert result["rss_bytes"] > 1 << 20


def test_a_mistake_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "workload.json").write_text('{"requests": []}')
    command = [sys.executable, "-m", "penstock.worker.engine.offline", "--model", "/no/such/folder"]
    command += ["--workload", str(tmp_path / "workload.json"), "--output", str(tmp_path / "output.json")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert result.returncode == 1
    assert result.stderr.startswith("error: model folder '/no/such/folder' does not exist; give a folder that holds")
    assert result.stderr.count("\n") == 1


def test_a_workload_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "workload.json"
    path.write_text('{"requests": 3}')
    assert main(["--model", "m", "--workload", str(path), "--output", str(tmp_path / "o")]) == 2
    assert capsys.readouterr().err.startswith(f"error: the workload {path} cannot be read: Expected `array`")


def test_outputs_keep_the_order_of_the_file_whoever_arrives_first(make_core: Callable[..., EngineCore]) -> None:
    core = make_core("llama")
    prompts = [[5, 6, 7], [8], [9, 10]]
    alone = [generate(core, [request("r", prompt, max_tokens=6)])["r"] for prompt in prompts]
    late_first = [
        OfflineRequest(prompt, GREEDY, arrival_s) for prompt, arrival_s in zip(prompts, (0.02, 0.0, 0.01), strict=True)
    ]
    assert run_workload(core, late_first, load_s=0.0).output_token_ids == alone


def test_a_refused_request_stops_the_run(make_core: Callable[..., EngineCore]) -> None:
    with pytest.raises(PenstockError, match="request 0: prompt_token_ids holds 500"):
        run_workload(make_core("llama"), [OfflineRequest([500], GREEDY)], load_s=0.0)


def test_every_id_of_a_random_model_decodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = random_model.SHAPES["smol135"]()
    small.num_hidden_layers = 1
    monkeypatch.setitem(random_model.SHAPES, "small", lambda: small)
    random_model.write_random_model("small", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["vocab_size"], config["dtype"], config["eos_token_id"]) == (49152, "bfloat16", None)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("penstock é").ids) == "penstock é"
    assert max(tokenizer.get_vocab().values()) < config["vocab_size"]
    assert tokenizer.decode([300, 49151]) == ""


def test_random_weights_need_no_file_of_them_and_are_the_same_with_the_same_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, workload = tmp_path / "model", tmp_path / "workload.json"
    folder.mkdir()
    random_model.write_model_without_weights("tiny", folder, max_model_len=128)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tokenizer.json"]
    workload.write_text(json.dumps({"requests": [{"prompt_token_ids": [5, 6, 7], "sampling_params": GREEDY}]}))
    command = ["--model", str(folder), "--threads", "1", "--workload", str(workload)]
    command += ["--kv-cache-memory", str(1 << 24), "--dtype", "bfloat16"]
    found = []
    for name in ("first", "second"):
        output = tmp_path / name
        assert main([*command, "--load-format", "dummy", "--output", str(output)]) == 0
        found.append(json.loads(output.read_text())["output_token_ids"])
    assert found[0] == found[1]
    assert len(set(found[0][0])) > 1
    assert main([*command, "--output", str(tmp_path / "third")]) == 1
    assert "lacks weights" in capsys.readouterr().err


def test_phase_results_are_yielded_after_each_phase(make_core: Callable[..., EngineCore]) -> None:
    requests = [OfflineRequest([5, 6], GREEDY)]
    phases = [Phase("first", requests), Phase("bad", [OfflineRequest([500], GREEDY)])]
    told = run_phases(make_core("llama"), phases)
    assert [phase.name for phase in next(told).phases] == ["first"]
    with pytest.raises(PenstockError, match="request 0: prompt_token_ids holds 500"):
        next(told)


@pytest.mark.gpu
def test_the_busy_share_of_a_gpu_is_measured(make_core: Callable[..., EngineCore]) -> None:
    core = make_core("llama", device="cuda", gpu_memory_utilization=0.1)
    phases = [Phase("seen", [OfflineRequest([5, 6], GREEDY)], observes_device=True)]
    (result,) = run_phases(core, phases)
    assert result.phases[0].device_busy_share is not None
    assert 0 < result.phases[0].device_busy_share <= 1


@pytest.mark.parametrize(
    ("intervals", "share"),
    [([], None), ([(3.0, 3.0)], None), ([(4.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)], 5 / 6), ([(1.0, 2.0)], 1.0)],
)
def test_overlapping_kernels_count_once(intervals: list[tuple[float, float]], share: float | None) -> None:
    assert covered_share(intervals) == share
