"""SmolLM2-135M-Instruct in the engine: tokens, greedy answers, number formats, grammars and drafts."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import torch

from penstock.ops.lab.bench.engines.quality import KL_LIMITS
from penstock.shared.control.engine import Sleep, WakeUp
from penstock.shared.messages.core import UtilityCall
from penstock.worker.config.computing import DEFAULT_DRAFT_TOKENS
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import Engine
from penstock.worker.engine.drafting.drafters import SuffixMemory
from penstock.worker.engine.drafting.speculation import NoMemory, Speculation
from penstock.worker.engine.offline.quality import measure_quality
from penstock.worker.engine.offline.run import OfflineRequest, run_workload
from penstock.worker.keeper.cards import weight_bytes_of
from penstock.worker.models.checks.kl_limits import QUALITY_TEXT
from penstock.worker.text.tokenizer import TextCodec

from .conftest import HERE, engine_of
from .texts import token_texts

# In one lane, since an engine takes a gigabyte.
pytestmark = [pytest.mark.real_model, pytest.mark.xdist_group("real_model")]

Answers = list[dict[str, list[int]]]

# Of the text, a third of those of the limits: torch is slow in bfloat16 where the processor has no instructions for it.
NUM_CHARACTERS = 1_700
# In float32, on them.
PERPLEXITY = 26.3479

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2030},
        "tags": {"type": "array", "items": {"enum": ["drama", "comedy", "documentary"]}, "maxItems": 3},
    },
    "required": ["title", "year", "tags"],
    "additionalProperties": False,
}
# Engines in float32, in which tokens are equal on every processor.
ENGINES = {
    "xgrammar": {},
    "llguidance and ngram": {"structured_outputs_backend": "llguidance", "speculative": "ngram"},
    "suffix": {"speculative": "suffix"},
}


NUM_FREE_ROWS = 24


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, smollm2: Path) -> Iterator[Engine]:
    with engine_of(smollm2, dtype="float32", max_num_seqs=32, **ENGINES[request.param]) as engine:
        if (method := engine.ready.speculative) != "off":
            # However many rows of a step are free on this machine.
            memory = SuffixMemory() if method == "suffix" else NoMemory()
            engine.core.scheduler._drafting = Speculation(DEFAULT_DRAFT_TOKENS, NUM_FREE_ROWS, memory)
        yield engine


def run(engine: Engine, prompts: list[list[int]], concurrency: int = 0, **params: Any) -> list[list[int]]:
    requests = [OfflineRequest(prompt, {"temperature": 0.0, **params}) for prompt in prompts]
    return run_workload(engine.core, requests, 0.0, concurrency=concurrency).output_token_ids


def test_tokens_are_those_of_llama_cpp(codec: TextCodec) -> None:
    texts, tables = token_texts(), json.loads((HERE / "tokens.json").read_text())
    assert [codec.encode(text, add_special_tokens=False) for text in texts] == tables
    assert [codec.decode(token_ids, skip_special_tokens=False) for token_ids in tables] == texts


@pytest.mark.timeout(3600)  # packs four bits; torch is slow in bfloat16 without its instructions
def test_number_formats_stay_near_float32(smollm2: Path) -> None:
    text = QUALITY_TEXT.read_text(encoding="utf-8")[:NUM_CHARACTERS]
    caches = [{"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}]
    # Packing in four bits is most of the time, so int4-mixed is not measured here. Tests of the demo model compare it
    # with int8 and int4.
    weights = [{"quantization": name} for name in ("int8", "int4")]
    formats = [{}, {"dtype": "auto"}, *weights, *caches]
    reference, *others = measure_quality(
        str(smollm2), text, formats, reference="float32", num_threads=torch.get_num_threads()
    ).formats
    assert reference.perplexity == pytest.approx(PERPLEXITY, rel=1e-3)
    measured = {(result.weights, result.kv_cache): result.kl or 0.0 for result in others}
    assert measured.keys() == KL_LIMITS.keys() - {("int4-mixed", "bfloat16")}
    assert all(0 < kl < KL_LIMITS[name] for name, kl in measured.items()), measured


def test_greedy_answers_are_those_of_transformers(engine: Engine, answers: Answers) -> None:
    """Also with drafts, which are used by requests that run alone."""
    is_drafting = engine.ready.speculative != "off"
    chosen = answers[1:5] if is_drafting else answers
    outputs = run(engine, [one["prompt"] for one in chosen], int(is_drafting), max_tokens=48)
    expected = [one["output"] for one in chosen]
    assert [output[: len(ids)] for output, ids in zip(outputs, expected, strict=True)] == expected
    assert bool(engine.core.stats().num_accepted_tokens) == is_drafting


def test_answers_follow_a_schema(engine: Engine, codec: TextCodec) -> None:
    """They end by themselves: a model that is held to short tokens or endless whitespace does not."""
    films = ("Titanic", "The Matrix")
    prompts = [
        codec.encode_chat([{"role": "user", "content": f"Describe the film {film} as JSON."}], None) for film in films
    ]
    for output in run(engine, prompts, structured_outputs={"json": SCHEMA}, max_tokens=150):
        text = codec.decode(output, skip_special_tokens=True)
        jsonschema.validate(json.loads(text), SCHEMA)
        # A token has three characters on average, and one where each byte is spelled alone.
        assert len(output) < len(text) * 0.75, text


def test_each_sleep_gives_back_as_much_as_the_first(smollm2: Path) -> None:
    """Collect no garbage between the calls, as a core rarely does."""
    with engine_of(smollm2) as engine:
        estimate = weight_bytes_of(EngineConfig(model=str(smollm2)))
        assert engine.ready.weight_bytes == pytest.approx(estimate, rel=0.02)
        gc.collect()
        gc.disable()
        try:
            sizes: list[int] = []
            for _ in range(6):
                for call in (Sleep(level=2), WakeUp()):
                    answer = engine.control.answer(UtilityCall(1, call))
                    assert answer is not None
                    assert answer.error is None
                    if isinstance(call, Sleep):
                        sizes.append(psutil.Process().memory_full_info().uss)
        finally:
            gc.enable()
    assert max(sizes) < 1.1 * sizes[0], sizes


def test_weights_take_what_the_header_of_their_file_says(engine: Engine, smollm2: Path) -> None:
    estimate = weight_bytes_of(EngineConfig(model=str(smollm2), dtype="float32"))
    assert engine.ready.weight_bytes == pytest.approx(estimate, rel=0.02)
