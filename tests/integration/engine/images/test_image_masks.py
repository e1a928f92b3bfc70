"""Images whose tokens see each other (Gemma 3): computed whole, in every way, wherever a prompt is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.ops.lab.survey.images.models import write_vision_model
from penstock.ops.lab.survey.images.processors import PLACEHOLDER
from penstock.ops.lab.survey.images.truth import by_transformers, load_by_transformers, picture, png
from penstock.shared.errors import ModelLoadError
from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.images import ImageInput
from penstock.shared.params.sampling import SamplingParams
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import Engine, build_engine
from penstock.worker.models.images import vision_model
from penstock.worker.models.lean import forward as lean_forward

NUM_TOKENS = 8
# The image's 16 tokens begin behind two of its marks, at 21, and end within the third block of 16.
WORDS = list(range(40, 59))
IMAGES = {"one": [picture(1)], "two": [picture(2, 20, 50), picture(3, 64, 33)]}
PROMPTS = {
    "one": [*WORDS, PLACEHOLDER, *range(80, 87)],
    "two": [*WORDS, PLACEHOLDER, 70, 71, PLACEHOLDER, *range(80, 87)],
}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder of a small Gemma 3, and its processor."""
    folder = tmp_path_factory.mktemp("gemma3")
    return folder, write_vision_model("gemma3", folder)


@pytest.fixture(scope="module")
def wanted(gemma: tuple[Path, Any]) -> dict[str, list[int]]:
    """Return what transformers generates."""
    folder, processor = gemma
    theirs = load_by_transformers(folder)
    return {name: by_transformers(theirs, processor, PROMPTS[name], IMAGES[name], NUM_TOKENS) for name in PROMPTS}


@pytest.fixture
def make(gemma: tuple[Path, Any]) -> Callable[..., Engine]:
    def build(**options: Any) -> Engine:
        given = {"max_num_seqs": 4, "block_size": 8, "kv_cache_memory": 4 << 20, "num_threads": 1, **options}
        return build_engine(EngineConfig(model=str(gemma[0]), **given), gemma[0])

    return build


def asked(name: str, **fields: Any) -> EngineCoreRequest:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    images = [ImageInput.from_bytes(png(image)) for image in IMAGES[name]]
    given = {"prompt_token_ids": PROMPTS[name], "sampling_params": params, "images": images, **fields}
    return EngineCoreRequest(request_id=name, **given)


def run(engine: Engine, requests: list[EngineCoreRequest]) -> dict[str, list[EngineCoreOutput]]:
    outputs: dict[str, list[EngineCoreOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        assert engine.core.add_request(request) is None
    while engine.core.has_work:
        for output in engine.core.step_fn():
            assert output.error is None, output.error
            outputs[output.request_id].append(output)
        engine.core.check_invariants()
    return outputs


def tokens_of(outputs: dict[str, list[EngineCoreOutput]]) -> dict[str, list[int]]:
    return {name: [token for row in rows for token in row.new_token_ids] for name, rows in outputs.items()}


def refuse(*_: Any) -> None:
    raise ModelLoadError("not here")


@pytest.mark.parametrize("way", ["compiled", "lean", "packed"])
def test_every_way_gives_the_tokens_of_transformers(
    way: str, make: Callable[..., Engine], wanted: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "packed":
        monkeypatch.setattr(lean_forward, "read_decoder", refuse)
    options: dict[str, Any] = {"native_kernels": way == "compiled", "speculative": "ngram:3", "block_size": 16}
    with capture_logs() as logs:
        engine = make(max_num_batched_tokens=19, **options)
    modes = [line["mode"] for line in logs if line["event"] == "forward_mode"]
    assert (modes, engine.ready.attention_backend) == {
        "compiled": (["lean"], "native"), "lean": (["lean"], "reference"), "packed": (["packed"], "reference"),
    }[way]  # fmt: skip
    assert engine.ready.max_images == 8, engine.ready.image_refusal
    for _ in range(2):  # the second time most of it is found
        assert tokens_of(run(engine, [asked("one"), asked("two")])) == wanted


def test_a_prefix_hit_ends_before_an_image_that_it_would_cut(
    gemma: tuple[Path, Any], make: Callable[..., Engine], wanted: dict[str, list[int]]
) -> None:
    """The first four blocks are cached by another request, and the fourth ends within the image."""
    engine = make()
    other = [*WORDS, PLACEHOLDER, *range(90, 99)]
    run(engine, [asked("one", prompt_token_ids=other)])
    outputs = run(engine, [asked("one")])
    assert outputs["one"][0].num_cached_tokens == 16
    assert tokens_of(outputs)["one"] == wanted["one"]
    # All of the image, and what is behind it.
    assert run(engine, [asked("one")])["one"][0].num_cached_tokens == 40


def test_line_breaks_next_to_an_image_merge_with_its_own(gemma: tuple[Path, Any], make: Callable[..., Engine]) -> None:
    folder, processor = gemma
    (line_break,) = processor.tokenizer.encode("\n", add_special_tokens=False)
    prompt = [*WORDS, line_break, PLACEHOLDER, line_break, PLACEHOLDER, PLACEHOLDER, *range(80, 87)]
    pictures = [*IMAGES["two"], *IMAGES["one"]]
    wanted = by_transformers(load_by_transformers(folder), processor, prompt, pictures, NUM_TOKENS)
    images = [ImageInput.from_bytes(png(image)) for image in pictures]
    outputs = run(make(), [asked("one", prompt_token_ids=prompt, images=images)])
    assert tokens_of(outputs)["one"] == wanted
    text = processor.tokenizer.decode(prompt)
    whole = processor(text=text, images=pictures, add_special_tokens=False)["input_ids"][0]
    # One fewer at each of three seams.
    assert outputs["one"][0].num_prompt_tokens == len(whole) == len(prompt) - 3 + 3 * 20 - 3


def test_a_token_budget_too_small_for_images_is_reported_and_text_is_served(make: Callable[..., Engine]) -> None:
    engine = make(max_num_batched_tokens=18)
    assert engine.ready.max_images == 0
    assert "max_num_batched_tokens (18) is too small; set it to 19 at least" in engine.ready.image_refusal
    text = asked("one", prompt_token_ids=WORDS, images=None)
    assert len(tokens_of(run(engine, [text]))["one"]) == NUM_TOKENS
    assert "--deterministic does not compute" in make(deterministic=True).ready.image_refusal


def test_a_model_with_an_unknown_image_mask_is_distinguished_from_a_known_one(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is treated as if its image tokens attended only to earlier tokens."""
    monkeypatch.setattr(vision_model, "SEES_ITSELF", frozenset())
    refusal = make().ready.image_refusal
    assert "features in place of placeholders give other results" in refusal or "cannot be tried out" in refusal
