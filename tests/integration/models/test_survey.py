"""``make models``: the table says what became of a model type, also of one that could not be tried."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.ops.lab.survey import layouts, ways
from penstock.ops.lab.survey.__main__ import main
from penstock.ops.lab.survey.kept import KeptOutcomes
from penstock.ops.lab.survey.model_types import NOT_TEXT_DECODERS
from penstock.ops.lab.survey.outcome import NEVER, SAME, WAYS, Outcome
from penstock.ops.lab.survey.table import page


def survey(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.ops.lab.survey", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("warm_python")
def test_the_table_of_some_types(tmp_path: Path) -> None:
    out = tmp_path / "models.md"
    done = survey("--only", "gpt2,rwkv,whisper", "--out", str(out))
    assert done.returncode == 0
    lines = out.read_text().splitlines()
    assert any(line.startswith("Of 2 text decoders") and "**1**" in line and ": 1 packed." in line for line in lines)
    assert "| gpt2 | packed | same | same | same | same |  |" in lines
    (refused,) = [line for line in lines if line.startswith("| rwkv ")]
    assert "RwkvForCausalLM cannot be served. packed, split: it does not let" in refused
    (skipped,) = [line for line in lines if line.startswith("| whisper ")]
    assert skipped.endswith("not tried: " + NOT_TEXT_DECODERS["whisper"] + " |")
    assert skipped.count("|") == lines[lines.index(skipped) - 1].count("|")


@pytest.mark.usefixtures("warm_python")
def test_the_table_of_engines_of_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "models.md"
    assert survey("--only", "llama,gpt2", "--tensor-parallel", "2", "--out", str(out)).returncode == 0
    lines = out.read_text().splitlines()
    assert any("Each engine has `tensor_parallel_size` 2" in line for line in lines)
    assert "| llama | lean | same | same | same | same |  |" in lines
    (refused,) = [line for line in lines if line.startswith("| gpt2 ")]
    assert "has no plan for how ranks share GPT2LMHeadModel" in refused


@pytest.mark.usefixtures("warm_python")
def test_the_table_of_a_model_that_reads_images(tmp_path: Path) -> None:
    out = tmp_path / "models.md"
    done = survey("--only", "qwen2_5_vl", "--out", str(out))
    assert done.returncode == 0
    page = out.read_text()
    assert "**1** of 1 give the tokens of transformers' own `generate` with images" in page
    assert "| qwen2_5_vl | packed | same | same | same | same | same | same |  |" in page
    assert "| lfm2_vl | | | | | | | | not tried: transformers has its image processor for torchvision alone" in page


def test_a_type_that_takes_too_long(tmp_path: Path) -> None:
    out = tmp_path / "models.md"
    done = survey("--only", "gpt2", "--timeout-s", "0.01", "--out", str(out))
    assert "gpt2 (0 s):  not through after 0 s" in done.stderr
    assert "**0**" in out.read_text()


def test_a_type_that_does_not_exist(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["survey", "--only", "gpt2,gtp3"])
    assert main() == 1
    assert capsys.readouterr().err == "transformers has no causal language model of type gtp3\n"


def test_a_stopped_survey_resumes_after_its_last_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, out = tmp_path / "rows", tmp_path / "models.md"
    options = {"tensor_parallel_size": 2}
    KeptOutcomes(rows, options).add(Outcome(model_type="gpt2", mode="kept"))
    with rows.open("a") as file:
        file.write('{"model_type": "llam')
    again = KeptOutcomes(rows, options)
    again.add(Outcome(model_type="olmo", reason="kept behind what was cut off"))
    assert KeptOutcomes(rows, options).found.keys() == {"gpt2", "olmo"}

    words = ["survey", "--only", "gpt2,olmo", "--tensor-parallel", "2", "--rows", str(rows), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    assert main() == 0
    assert "| gpt2 | kept |" in out.read_text()
    assert KeptOutcomes(rows, {}).found == {}, "of other engines"
    assert "3 more were not tried yet" in page([], {}, num_untried=3)


def test_the_table_of_families_over_two_ranks(tmp_path: Path) -> None:
    rows, page = tmp_path / "rows", tmp_path / "page.md"
    page.write_text("before\n<!-- families over two ranks -->\nold\n<!-- end of the families -->\nbehind\n")
    kept = KeptOutcomes(rows, {})
    same: dict[str, str] = dict.fromkeys(WAYS, SAME)
    kept.add(Outcome(model_type="llama tp 2", mode="lean", told=same))
    kept.add(Outcome(model_type="llama pp 2", mode="lean", told=same | {"mixed": "1 of 6 differ"}))
    kept.add(Outcome(model_type="phi3 tp 2", reason="not loaded: no Phi3ForCausalLM here"))
    kept.add(Outcome(model_type="phi3 pp 2", reason="not loaded: no PhiForCausalLM here"))
    words = ["--only", "llama,phi3", "--layouts", "tp 2,pp 2", "--rows", str(rows), "--into", str(page)]
    assert layouts.main(words) == 0
    written = page.read_text()
    assert "| llama | same (lean) | no [1] |\n| phi3 | no [2] | no [2] |\n\n1. alone: same, mixed: 1 of 6" in written
    assert "\n2. no the architecture here\n" in written
    assert written.startswith("before\n<!--")
    assert written.endswith("-->\nbehind\n")
    assert "old" not in written


def test_only_equal_tokens_in_every_way_count() -> None:
    same: dict[str, str] = dict.fromkeys(WAYS, SAME)
    assert Outcome(model_type="m", told=same).is_identical
    assert Outcome(model_type="m", told=same | {"preempted": NEVER}).is_identical
    assert not Outcome(model_type="m", told=same | {"mixed": "1 of 6 differ"}).is_identical
    assert not Outcome(model_type="m", told={"alone": SAME}).is_identical
    assert "**1** give" in page([Outcome(model_type="a", mode="packed", told=same), Outcome(model_type="b")], {})


@pytest.mark.usefixtures("compiled")
def test_the_gain_of_the_lean_path_is_reported_per_family(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for sizes in (ways._SIZES, ways._EXPERTS["gpt_oss"]):
        for name, size in {"hidden_size": 144, "intermediate_size": 64, "head_dim": 16}.items():
            if name in sizes:
                monkeypatch.setitem(sizes, name, size)
    assert ways.main(["--only", "gemma2,gpt_oss", "--layers", "2", "--rounds", "1", "--turn-s", "0.001"]) == 0
    *_, head, _, gemma, gpt = capsys.readouterr().out.splitlines()
    assert head.count("|") == gemma.count("|") == gpt.count("|") == 11
    assert all(float(cell) > 0 for cell in [*gemma.split("|")[2:-1], *gpt.split("|")[2:-1]])
