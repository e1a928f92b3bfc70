"""Images in prompts, computed by small models that read them, against transformers' ``generate``."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from PIL import Image

from penstock.ops.lab.survey.images.models import SEEING, small_budget, write_vision_model
from penstock.ops.lab.survey.images.processors import PLACEHOLDER, PartsAlone, StandIn, byte_tokenizer
from penstock.ops.lab.survey.images.trial import rooms
from penstock.ops.lab.survey.images.truth import by_transformers, load_by_transformers, picture, png
from penstock.shared.control.engine import ENCODER, MULTIMODAL, InputCacheReset, ResetInputCache, Sleep, WakeUp
from penstock.shared.errors import ModelLoadError
from penstock.shared.messages.core import EngineCoreOutput
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.shared.params.images import ImageInput
from penstock.shared.params.sampling import SamplingParams
from penstock.shared.stats import ImageStats
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import Engine, build_engine
from penstock.worker.engine.images.admission import ImageAdmission
from penstock.worker.engine.ranks.one import OneRank
from penstock.worker.models.images.model_parts import VisionEncoder
from penstock.worker.models.images.processor import ImageProcessor
from penstock.worker.models.images.vision_model import image_refusal_of, is_vision_type
from penstock.worker.models.loaded import LoadedModel

from ..harness import BYTES_PER_TOKEN, ask

NUM_TOKENS = 12
# Models whose requests are also preempted: one for each way in which a text decoder counts and sees an image's tokens.
# Of the others only vision towers and processors differ, of which a request that is preempted takes cached features.
PREEMPTED = ("llava", "llava_onevision", "idefics3", "qwen2_5_vl", "qwen3_vl_moe", "glm4v_moe", "gemma3")
# Whose processor makes something else of several images than of each alone.
ONE_A_REQUEST = ("llava_onevision",)
# Tokens of ASCII, which decode to the text that they come from; longer than a block, so that what is in front of an
# image is shared without it.
WORDS = list(range(40, 61))
ONE = [*WORDS, PLACEHOLDER, *range(80, 87)]
TWO = [*WORDS, PLACEHOLDER, 70, 71, PLACEHOLDER, *range(80, 87)]

Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """The folder of a model of ``SEEING`` and its processor."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, write_vision_model(name, folder)
        return made[name]

    return make


@pytest.fixture
def make(folders: Callable[[str], tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch) -> Make:
    """Build an engine over a model of ``SEEING``, or over one that another engine has loaded and is done with."""

    def build(name: str = "llava", model: LoadedModel | None = None, **options: Any) -> Engine:
        folder, processor = folders(name)
        if isinstance(processor, StandIn) and not isinstance(processor, PartsAlone):
            monkeypatch.setattr(ImageProcessor, "load", lambda *_, **__: ImageProcessor(processor))
        given = {"max_num_seqs": 6, "block_size": 8, "kv_cache_memory": 8 << 20, "num_threads": 1, **options}
        config = EngineConfig(model=str(folder), **given)
        return build_engine(config, folder, ranks=None if model is None else OneRank(config, folder, model))

    return build


def seeing(
    request_id: str, prompt: list[int], images: Sequence[Image.Image | bytes], **fields: Any
) -> EngineCoreRequest:
    files = [image if isinstance(image, bytes) else png(image) for image in images]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return EngineCoreRequest(
        request_id=request_id, prompt_token_ids=prompt, images=[ImageInput.from_bytes(file) for file in files],
        **{"sampling_params": params, **fields},
    )  # fmt: skip


def run(engine: Engine, requests: list[EngineCoreRequest]) -> dict[str, list[EngineCoreOutput]]:
    """All outputs, to the end."""
    outputs: dict[str, list[EngineCoreOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        refused = engine.core.add_request(request)
        if refused is not None:
            outputs[request.request_id].append(refused)
    while engine.core.has_work:
        for output in engine.core.step_fn():
            outputs[output.request_id].append(output)
        engine.core.check_invariants()
    return outputs


def generate(engine: Engine, requests: list[EngineCoreRequest]) -> dict[str, list[int]]:
    return {request_id: tokens_of(rows) for request_id, rows in run(engine, requests).items()}


def tokens_of(rows: list[EngineCoreOutput]) -> list[int]:
    assert all(row.error is None for row in rows), rows[-1].error
    return [token_id for row in rows for token_id in row.new_token_ids]


def counts(engine: Engine) -> tuple[int, int]:
    """Images processed, and images that the tower has computed."""
    images = engine.core.images
    assert isinstance(images, ImageAdmission)
    return images.num_processed, images.num_encoded


@pytest.mark.parametrize("name", SEEING)
def test_tokens_are_those_of_transformers(name: str, make: Make, folders: Callable[[str], tuple[Path, Any]]) -> None:
    """Try one image and two, of different sizes; in chunks that end inside of images; and some models preempted."""
    folder, processor = folders(name)
    one, two = [picture(1)], [picture(2, 20, 50), picture(3, 64, 33)]
    prompt, shown = (ONE, [picture(4, 90, 30)]) if name in ONE_A_REQUEST else (TWO, two)
    theirs = load_by_transformers(folder)
    wanted = {
        "one": by_transformers(theirs, processor, ONE, one, NUM_TOKENS),
        "two": by_transformers(theirs, processor, prompt, shown, NUM_TOKENS),
        "other": by_transformers(theirs, processor, ONE, two[:1], NUM_TOKENS),
    }
    assert len({tuple(tokens) for tokens in wanted.values()}) == 3, "the model does not look at its images"

    def requests() -> list[EngineCoreRequest]:
        return [seeing("one", ONE, one), seeing("two", prompt, shown), seeing("other", ONE, two[:1])]  # fmt: skip

    small = {"max_num_batched_tokens": small_budget(name), "enable_prefix_caching": False}
    roomy = make(name)
    outputs = run(roomy, requests())
    assert {request_id: tokens_of(rows) for request_id, rows in outputs.items()} == wanted
    assert isinstance(roomy.ranks, OneRank)
    ours = roomy.ranks.model
    assert generate(make(name, ours, **small), requests()) == wanted
    if name not in PREEMPTED:
        return
    # Room for the prompts of the first two, and not for what they generate.
    lens = {request_id: rows[0].num_prompt_tokens for request_id, rows in outputs.items()}
    ours = replace(ours, max_model_len=max(lens.values()) + NUM_TOKENS)
    # Layers with windows give blocks back: there is room in less.
    for num_tokens in rooms(lens["one"] + lens["two"] + 4, ours.max_model_len):
        cramped = make(name, ours, **small, block_size=2, kv_cache_memory=num_tokens * BYTES_PER_TOKEN)
        assert generate(cramped, requests()) == wanted
        # From here on no image is waited for, so they come in the order that is asked. Of gemma3 nobody is preempted
        # unless the longest comes first.
        before = cramped.core.scheduler.stats().num_preemptions
        assert generate(cramped, sorted(requests(), key=lambda each: -lens[each.request_id])) == wanted
        if cramped.core.scheduler.stats().num_preemptions > before:
            return
    pytest.fail("nobody was preempted")


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_a_request_resumed_on_another_engine_gives_the_same_tokens(name: str, make: Make) -> None:
    images = [picture(2, 20, 50), picture(3, 64, 33)]
    whole = generate(make(name), [seeing("r", TWO, images)])["r"]
    rest = generate(make(name, async_scheduling=True), [seeing("r", TWO, images, output_token_ids=whole[:5])])["r"]
    assert whole[:5] + rest == whole


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_models_with_three_axis_positions_give_the_tokens_of_transformers(
    name: str, make: Make, folders: Callable[[str], tuple[Path, Any]]
) -> None:
    """Covers text next to images in a batch, drafts after them, and cached blocks of an image."""
    folder, processor = folders(name)
    image = picture(2, 20, 50)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    text = EngineCoreRequest(request_id="text", prompt_token_ids=[*WORDS, *WORDS], sampling_params=params)
    theirs = load_by_transformers(folder)
    wanted = {
        "text": by_transformers(theirs, processor, [*WORDS, *WORDS], [], NUM_TOKENS),
        "one": by_transformers(theirs, processor, ONE, [image], NUM_TOKENS),
    }
    for options in ({}, {"speculative": "ngram:3"}, {"async_scheduling": True}):
        engine = make(name, **options)
        assert engine.ready.max_images == 8, engine.ready.image_refusal
        for _ in range(2):
            assert generate(engine, [text, seeing("one", ONE, [image])]) == wanted
        assert engine.core.stats().prefix_cache_hits > len(WORDS)
    ask(engine, Sleep(level=2))
    ask(engine, WakeUp())
    assert generate(engine, [seeing("one", ONE, [image])])["one"] == wanted["one"]
    strict = make(name, deterministic=True)
    assert "--deterministic does not compute" in strict.ready.image_refusal
    assert len(generate(strict, [text])["text"]) == NUM_TOKENS


def test_the_same_image_is_computed_once(make: Make) -> None:
    engine = make(enable_prefix_caching=False)
    image = png(picture(5))
    first = generate(engine, [seeing("a", ONE, [image]), seeing("b", TWO, [image, image])])
    assert counts(engine) == (1, 1)
    assert generate(engine, [seeing("a", ONE, [image])])["a"] == first["a"]
    assert counts(engine) == (1, 1)
    # Another tenant does not learn from a quick answer what others have shown.
    generate(engine, [seeing("c", ONE, [image], tenant="other")])
    assert counts(engine) == (2, 2)


def test_cache_hits_and_stored_features_of_images_are_counted(make: Make) -> None:
    engine = make(enable_prefix_caching=False)
    assert engine.core.stats().images == ImageStats()
    generate(engine, [seeing("a", ONE, [picture(1)]), seeing("b", TWO, [picture(1), picture(2)])])
    first = engine.core.stats().images
    assert first is not None
    assert (first.num_cache_hits, first.num_encoded, first.num_processed) == (1, 2, 2)
    # 16 features of 64 numbers of 4 bytes, and 3 planes of 16 by 16 pixels, of each.
    assert first.memory_bytes == 2 * (16 * 64 * 4 + 3 * 16 * 16 * 4)
    reset(engine, ENCODER)
    generate(engine, [seeing("a", ONE, [picture(1)])])
    again = engine.core.stats().images
    assert again is not None
    assert (again.num_cache_hits, again.num_encoded, again.num_processed) == (1, 3, 2)
    assert make(max_images=0).core.stats().images is None


def reset(engine: Engine, cache: str) -> int:
    answer = ask(engine, ResetInputCache(cache))
    assert isinstance(answer, InputCacheReset)
    return answer.num_entries


def test_resets_forget_and_count(make: Make) -> None:
    engine = make(enable_prefix_caching=False)
    requests = [seeing("a", ONE, [picture(1)]), seeing("b", ONE, [picture(2)])]
    generate(engine, requests)
    assert (reset(engine, ENCODER), reset(engine, ENCODER)) == (2, 0)
    generate(engine, requests)
    assert counts(engine) == (2, 4)
    assert (reset(engine, MULTIMODAL), reset(engine, ENCODER)) == (2, 2)
    generate(engine, requests)
    assert counts(engine) == (4, 6)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_sleeps_stores_no_images(make: Make, level: int) -> None:
    engine = make()
    generate(engine, [seeing("a", ONE, [picture(1)])])
    assert (images := engine.core.stats().images) is not None
    assert images.memory_bytes > 0
    ask(engine, Sleep(level=level))
    assert (images := engine.core.stats().images) is not None
    assert images.memory_bytes == 0


def test_nothing_is_kept_beyond_the_budget(make: Make) -> None:
    engine = make(image_cache_memory=0, enable_prefix_caching=False)
    image = png(picture(5))
    tokens = generate(engine, [seeing("a", ONE, [image])])
    assert generate(engine, [seeing("a", ONE, [image])]) == tokens
    assert counts(engine) == (2, 2)
    assert (reset(engine, MULTIMODAL), reset(engine, ENCODER)) == (0, 0)


def test_blocks_are_shared_between_requests_with_the_same_images(make: Make) -> None:
    """All requests share blocks before the image; later blocks are shared for equal images."""
    engine = make()

    def cached(request_id: str, image: Image.Image) -> int:
        (rows,) = run(engine, [seeing(request_id, ONE, [image])]).values()
        assert rows[0].num_prompt_tokens == len(ONE) - 1 + 16
        return rows[0].num_cached_tokens

    assert cached("first", picture(1)) == 0
    assert cached("same", picture(1)) == 40
    assert cached("other", picture(2)) == 16  # two blocks of eight words


def test_image_results_are_unchanged_after_sleep(make: Make) -> None:
    engine = make()
    before = generate(engine, [seeing("a", ONE, [picture(1)])])
    for level in (1, 2):
        ask(engine, Sleep(level=level))
        ask(engine, WakeUp())
        assert generate(engine, [seeing("a", ONE, [picture(1)])]) == before
    assert counts(engine)[1] == 3


def told(engine: Engine, request: EngineCoreRequest) -> str:
    (rows,) = run(engine, [request]).values()
    assert rows[-1].error is not None
    return rows[-1].error.message


def test_images_that_cannot_be_served_are_refused_with_a_reason(make: Make) -> None:
    engine = make(max_images=2, max_model_len=64)
    image = png(picture(1))
    assert "at most 2 in a request, got 3" in told(engine, seeing("r", [*TWO, PLACEHOLDER], [image] * 3))
    assert "2 placeholders (token 259) for 1 images" in told(engine, seeing("r", TWO, [image]))
    assert "0 placeholders" in told(engine, seeing("r", WORDS, [image]))
    assert "truncated or damaged" in told(engine, seeing("r", TWO, [image, image[:300]]))
    assert told(engine, seeing("r", TWO, [image, image[:300]])).startswith("images[1]: it is")
    wrong = seeing("r", ONE, [image])
    wrong.images = [ImageInput("0" * 64, image)]
    assert "do not match its digest" in told(engine, wrong)
    wrong.images = [ImageInput("1" * 64)]
    assert "its bytes are missing" in told(engine, wrong)
    logprobs = SamplingParams(prompt_logprobs=1)
    assert "prompt_logprobs" in told(engine, seeing("r", ONE, [image], sampling_params=logprobs))
    assert "max_model_len is 64" in told(engine, seeing("r", [*TWO, *WORDS], [image, image]))
    # And the engine goes on.
    assert len(generate(engine, [seeing("r", ONE, [image])])["r"]) == NUM_TOKENS


def test_an_engine_without_image_support_refuses_images_with_a_reason(
    make: Make, folders: Callable[[str], tuple[Path, Any]]
) -> None:
    engine = make(max_images=0)
    assert "max_images 0" in told(engine, seeing("r", ONE, [picture(1)]))
    text = EngineCoreRequest(request_id="t", prompt_token_ids=WORDS, sampling_params=SamplingParams(max_tokens=3))
    assert generate(engine, [text])["t"]


def test_aborted_requests_leave_nothing(make: Make) -> None:
    engine = make()
    assert engine.core.add_request(seeing("r", ONE, [picture(1)])) is None
    assert (engine.core.has_work, engine.core.num_unfinished_requests) == (True, 1)
    engine.core.abort_requests(["r"])
    assert (engine.core.has_work, engine.core.num_unfinished_requests) == (False, 0)


def load_again(folder: Path) -> Engine:
    config = EngineConfig(model=str(folder), max_num_seqs=2, kv_cache_memory=1 << 20, num_threads=1)
    return build_engine(config, folder)


def serves_text(engine: Engine) -> bool:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    text = EngineCoreRequest(request_id="t", prompt_token_ids=WORDS, sampling_params=params)
    return len(generate(engine, [text])["t"]) == 3


def test_a_model_with_wrong_image_results_is_served_with_text_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_vision_model("llava", tmp_path)
    encode = VisionEncoder.encode
    monkeypatch.setattr(VisionEncoder, "encode", lambda tower, image: encode(tower, image).flip(0))
    engine = load_again(tmp_path)
    assert (engine.ready.max_images, serves_text(engine)) == (0, True)
    assert "features in place of placeholders give other results" in engine.ready.image_refusal
    monkeypatch.undo()
    (tmp_path / "processor_config.json").unlink()
    engine = load_again(tmp_path)
    assert serves_text(engine)
    assert "its image processor cannot be loaded" in told(engine, seeing("r", ONE, [picture(1)]))


def test_a_processor_that_changes_several_images_is_limited_to_one(make: Make) -> None:
    engine = make("llava_onevision")
    assert engine.ready.max_images == 1
    assert "at most 1 in a request, got 2" in told(engine, seeing("r", TWO, [picture(1), picture(2)]))
    assert len(generate(engine, [seeing("r", ONE, [picture(1)])])["r"]) == NUM_TOKENS


def test_models_that_need_more_than_image_features_name_the_missing_part() -> None:
    """They serve text only, and requests with images get the missing part as their error."""
    config = transformers.CONFIG_MAPPING["gemma4"]()
    assert not is_vision_type(config)
    assert image_refusal_of(config).startswith("images of gemma4 are not served by this version: ")
    assert "the tokens of an image attend to each other" in image_refusal_of(config)
    assert image_refusal_of(transformers.LlamaConfig()) == "this model reads no images"


def test_a_model_with_bidirectional_prompt_attention_is_refused_by_name(tmp_path: Path) -> None:
    config = {"model_type": "paligemma", "architectures": ["PaliGemmaForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    byte_tokenizer("<image>").save_pretrained(tmp_path)
    for load_format in ("auto", "dummy"):
        with pytest.raises(
            ModelLoadError, match=r"PaliGemma.* is not served: all tokens of a prompt attend to each other"
        ):
            build_engine(EngineConfig(model=str(tmp_path), load_format=load_format), tmp_path)


def test_an_image_processor_of_a_package_that_is_missing_is_named(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer("<image>")
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Lfm2VlProcessor"}')
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Lfm2VlImageProcessor"}')
    (tmp_path / "config.json").write_text('{"model_type": "lfm2_vl"}')
    if importlib.util.find_spec("torchvision") is not None:
        pytest.skip("torchvision is here")
    with pytest.raises(ModelLoadError, match=r"it needs the package torchvision; .* built for torch \d"):
        ImageProcessor.load(tmp_path, trust_remote_code=False)
