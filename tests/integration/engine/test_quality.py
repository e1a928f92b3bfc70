"""``penstock quality``: its measures against transformers, its output for the demo model, and its refusals."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import transformers

from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import Engine, build_engine
from penstock.worker.engine.offline.quality import Quality, main, measure_quality
from penstock.worker.engine.offline.scoring import QualityMeter, cut_windows
from penstock.worker.models.checks.kl_limits import QUALITY_TEXT
from penstock.worker.text.tokenizer import TextCodec

from ...processes import DEADLINE_S
from .harness import VOCAB_SIZE

DEMO = Path(__file__).parents[3] / "ops" / "demo"
MODEL = str(DEMO / "model")


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A text that the demo model can read, long enough to judge by."""
    path = tmp_path / "text.txt"
    path.write_text("spell 407: four hundred seven.\ncount from two to five: two three four five.\n" * 16)
    return path


def float32_logprobs(folder: Path, windows: list[list[int]]) -> torch.Tensor:
    """Return transformers' log probabilities after each token but a window's last, ``[N, V]``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = [model(torch.tensor([window])).logits[0, :-1] for window in windows]
    return torch.log_softmax(torch.cat(logits).double(), -1)


def float32_engine(folder: Path) -> Engine:
    config = EngineConfig(model=str(folder), dtype="float32", num_threads=1, max_num_seqs=2, max_num_batched_tokens=8)
    return build_engine(config, folder)


def make_disturbed(folder: Path, target: Path) -> Path:
    """Write a copy of a model whose weights have some noise, so that it predicts similar tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.std(correction=0) * torch.randn_like(parameter)
    model.save_pretrained(target)
    (target / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    return target


def test_measures_equal_those_of_transformers(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    reference_folder = model_folder("llama")
    other_folder = make_disturbed(reference_folder, tmp_path / "disturbed")
    rng = random.Random(0)
    windows = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (20, 33, 2)]
    meter = QualityMeter(windows)
    reference = meter.measure_reference(float32_engine(reference_folder))
    scores = meter.compare(float32_engine(other_folder))
    own, others = float32_logprobs(reference_folder, windows), float32_logprobs(other_folder, windows)
    token_ids = torch.tensor([token_id for window in windows for token_id in window[1:]])[:, None]
    assert reference.num_tokens == scores.num_tokens == len(token_ids) == 52
    assert reference.perplexity == pytest.approx(float((-own.gather(1, token_ids).mean()).exp()), rel=1e-4)
    assert scores.perplexity == pytest.approx(float((-others.gather(1, token_ids).mean()).exp()), rel=1e-4)
    assert scores.kl == pytest.approx(float((own.exp() * (own - others)).sum(-1).mean()), rel=1e-3)
    assert scores.agreement == pytest.approx(float((own.argmax(-1) == others.argmax(-1)).float().mean()))
    assert 0 < scores.agreement < 1


def test_an_engine_is_at_no_distance_from_itself(model_folder: Callable[[str], Path]) -> None:
    meter, folder = QualityMeter([list(range(3, 40))]), model_folder("llama")
    reference = meter.measure_reference(float32_engine(folder))
    scores = meter.compare(float32_engine(folder))
    assert (reference.kl, reference.agreement, scores.agreement) == (0, 1, 1)
    assert 0 <= scores.kl < 1e-5


def test_windows_begin_as_prompts_do_and_lose_no_token() -> None:
    codec = TextCodec.load(DEMO / "model")
    text = "four five six seven eight nine." * 9
    windows = cut_windows(codec, text, 16)
    bos, *_ = codec.encode("")
    assert {window[0] for window in windows} == {bos}
    assert max(map(len, windows)) == 16
    assert [token_id for window in windows for token_id in window[1:]] == codec.encode_chunk(text)


def test_all_formats_of_the_demo_model(text_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([MODEL, "--text", str(text_file), "--reference", "float32", "--threads", "1", "--json"]) == 0
    quality = msgspec.json.decode(capsys.readouterr().out, type=Quality)
    names = [(result.weights, result.kv_cache) for result in quality.formats]
    assert names == [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("int8", "bfloat16"),
        ("int4-mixed", "bfloat16"),
        ("int4", "bfloat16"),
        ("bfloat16", "int8"),
        ("bfloat16", "fp8_e4m3"),
    ]
    kls = [result.kl or 0.0 for result in quality.formats]
    reference, bfloat16, int8, mixed, int4, int8_cache, fp8_cache = kls
    assert reference == 0 < bfloat16 < int8 < mixed < int4
    assert bfloat16 < int8_cache < fp8_cache
    assert quality.num_windows == -(-quality.num_tokens // 511)


def test_each_format_is_reported_before_it_is_computed(text_file: Path) -> None:
    sentences: list[str] = []
    text = text_file.read_text()
    measure_quality(MODEL, text, [{"kv_cache_dtype": "fp8"}], num_threads=1, report=sentences.append)
    assert sentences == ["computing bfloat16 …", "computing bfloat16, fp8_e4m3 …"]


def test_the_program_prints_a_table(text_file: Path, warm_python: str) -> None:
    """``test_wheel.py`` starts the program as users do."""
    command = [warm_python, "-m", "penstock.ops.cli", "quality", MODEL, "--text", str(text_file), "--threads", "1"]
    result = subprocess.run(
        [*command, "--kv-cache-dtype", "fp8"], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    title, _, header, reference, measured = result.stdout.splitlines()
    assert title.startswith(f"{MODEL}, ")
    assert header.split() == ["WEIGHTS", "KV", "CACHE", "PERPLEXITY", "KL", "(NATS)", "SAME", "FIRST", "CHOICE"]
    assert reference.split()[-2:] == ["reference", "reference"]
    assert measured.split()[:2] == ["bfloat16", "fp8_e4m3"]
    assert result.stderr == ""


@pytest.fixture
def mamba_folder(tmp_path: Path) -> Path:
    """A model of states, which transformers' code alone computes: it has no KV cache that could be of fewer bits."""
    folder = tmp_path / "model"
    sizes = {"vocab_size": 382, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1}
    config = transformers.AutoConfig.for_model(
        "mamba", **sizes, bos_token_id=1, eos_token_id=2, max_position_embeddings=64
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((DEMO / "model" / name).read_bytes())
    return folder


def test_a_format_that_the_model_refuses_is_a_line_of_the_table(
    mamba_folder: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(mamba_folder), "--text", str(text_file), "--threads", "1"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows[3:9]] == ["bfloat16", "int8", "int4-mixed", "int4", "bfloat16", "bfloat16"]
    for row, note, name in zip(rows[7:9], rows[9:11], ("int8", "fp8_e4m3"), strict=True):
        assert row[1:] == [name, "-", "-", "-"]
        assert " ".join(note).startswith(
            f"bfloat16, KV cache {name}: kv_cache_dtype {name!r} needs a model that attends"
        )


def test_a_format_that_was_requested_and_is_refused_is_a_sentence(
    mamba_folder: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(mamba_folder), "--text", str(text_file), "--threads", "1"]
    assert main([*arguments, "--kv-cache-dtype", "fp8"]) == 1
    assert capsys.readouterr().err.startswith("error: kv_cache_dtype 'fp8_e4m3' needs a model that attends")
    assert main([*arguments, "--window", "512"]) == 1
    assert capsys.readouterr().err.endswith("; --window N sets it to N + 1\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["/no/such/folder"], "model folder '/no/such/folder' does not exist"),
        ([MODEL, "--quantization", "int3"], "quantization must be one of int8, int4-mixed, int4, fp8, got 'int3'"),
        ([MODEL, "--quantization", "fp8"], "quantization 'fp8' needs a GPU"),
        ([MODEL, "--kv-cache-dtype", "int2"], "kv_cache_dtype must be one of"),
        ([MODEL, "--device", "tpu"], "device must be one of cpu, cuda, got 'tpu'"),
        ([MODEL, "--window", "1"], "--window must be between 2 and 65536, got 1"),
        ([MODEL, "--text", "/no/such/file"], "the text /no/such/file cannot be read: No such file or directory"),
        ([MODEL, "--text", str(DEMO / "model" / "model.safetensors")], "model.safetensors is not UTF-8"),
        ([MODEL, "--text", str(DEMO / "model" / "generation_config.json")], "tokens, too few to judge by; give --text"),
        ([str(DEMO / "embedder")], "generates no text, so it has no perplexity to measure"),
    ],
)
def test_a_mistake_is_a_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--threads", "1"]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert sentence in error


def test_the_bundled_text_is_long_enough() -> None:
    tokens = TextCodec.load(DEMO / "model").encode(QUALITY_TEXT.read_text())
    assert len(tokens) > 4000
