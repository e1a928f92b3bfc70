"""One model that reads images through transformers alone and through the engine, in the ways in which it may be cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from .....shared.errors import PenstockError
from .....shared.messages.requests import EngineCoreRequest
from .....shared.params.images import ImageInput
from .....shared.params.sampling import SamplingParams
from .....worker.config.engine_config import EngineConfig
from .....worker.engine.composition import Engine, build_engine
from .....worker.models.images.processor import ImageProcessor
from .....worker.models.loading.loader import load_model
from ..outcome import ONE_A_REQUEST, SAME, Outcome
from .models import small_budget, write_vision_model
from .processors import PLACEHOLDER, PartsAlone, StandIn
from .truth import by_transformers, load_by_transformers, picture, png

NUM_TOKENS = 12
# Longer than a block; ASCII, which decodes to the text that it comes from.
_WORDS = list(range(40, 61))
_ONE = [*_WORDS, PLACEHOLDER, *range(80, 87)]
_TWO = [*_WORDS, PLACEHOLDER, 70, 71, PLACEHOLDER, *range(80, 87)]
_DELIVERED = 5
# 4 layers x 2 KV heads x 16 dims x key and value x 4 bytes, as ``models.TEXT`` has them.
_BYTES_PER_TOKEN = 1024
# A cache for this many tokens delays no request.
_ROOMY_TOKENS = 8192


@dataclass(frozen=True)
class _ImagePrompt:
    prompt: list[int]
    images: list[Image.Image]


def try_vision_model(name: str, folder: Path) -> Outcome:
    """Try the model ``name`` of ``models.SEEING`` in this process, in the empty ``folder``.

    A replacement for a processor that needs torchvision is also used in the engine, and noted in the outcome.
    """
    outcome = Outcome(model_type=name)
    stage = "no model to try"
    try:
        processor = write_vision_model(name, folder)
        stage = "not loaded"
        if isinstance(processor, StandIn) and not isinstance(processor, PartsAlone):
            ImageProcessor.load = classmethod(lambda cls, *_, **__: cls(processor))  # type: ignore[method-assign]
            outcome.reason = "its processor needs torchvision; tried with the part of it that does not"
        model = load_model(EngineConfig(model=str(folder), num_threads=1), folder)
        if model.vision is None:
            raise PenstockError(model.image_refusal)
        outcome.mode = model.forward.mode
        stage = "failed"
        outcome.told = compare(name, folder, processor)
    except Exception as error:  # whatever an architecture's own code raises
        line = next(iter(str(error).strip().splitlines()), "")
        outcome.reason = f"{stage}: {line if isinstance(error, PenstockError) else f'{type(error).__name__}: {line}'}"
    return outcome


def compare(
    name: str, folder: Path, processor: Any, bytes_per_token: int = _BYTES_PER_TOKEN, **options: Any
) -> dict[str, str]:
    """Compare the model ``name`` of ``models.SEEING`` in each way. Return ``outcome.SAME`` or the difference, by way.

    Args:
        bytes_per_token: bytes of a token in the KV cache of a rank.
        options: of ``EngineConfig``, for all engines.

    Raises:
        PenstockError: the model reads no images, or a request failed.
    """
    two = [picture(2, 20, 50), picture(3, 64, 33)]
    prompts = {
        "one": _ImagePrompt(_ONE, [picture(1)]),
        "two": _ImagePrompt(_TWO, two),
        "other": _ImagePrompt(_ONE, two[:1]),
    }
    options = {"kv_cache_memory": _ROOMY_TOKENS * bytes_per_token, **options}
    with closing(_build(folder, **options)) as roomy:
        if not roomy.ready.max_images:
            raise PenstockError(roomy.ready.image_refusal)
        has_one = roomy.ready.max_images == 1
        if has_one:
            prompts["two"] = _ImagePrompt(_ONE, [picture(4, 90, 30)])
        theirs = load_by_transformers(folder)
        expected = {
            name: by_transformers(theirs, processor, one.prompt, one.images, NUM_TOKENS)
            for name, one in prompts.items()
        }
        if len({tuple(tokens) for tokens in expected.values()}) < len(expected):
            raise PenstockError("random models of it do not look at their images")
        alone = {name: _generate(roomy, {name: one}) for name, one in prompts.items()}
    results = {name: _judge(alone[name], {name: expected[name]}) for name in ("one", "two")}
    if has_one:
        both = {name: expected[name] for name in results}
        results = {"one": _judge({**alone["one"], **alone["two"]}, both), "two": ONE_A_REQUEST}
    with closing(_build(folder, **options)) as engine:
        results["mixed"] = _judge(_generate(engine, prompts), expected)
    small = {**options, "max_num_batched_tokens": small_budget(name), "enable_prefix_caching": False}
    with closing(_build(folder, **small)) as engine:
        results["chunked"] = _judge(_generate(engine, prompts), expected)
    results["preempted"] = _preempt(folder, processor, prompts, expected, bytes_per_token, **small)
    with closing(_build(folder, **options)) as engine:
        rest = _generate(engine, prompts, {name: tokens[:_DELIVERED] for name, tokens in expected.items()})
    results["resumed"] = _judge(rest, {name: tokens[_DELIVERED:] for name, tokens in expected.items()})
    return results


def _preempt(
    folder: Path,
    processor: Any,
    prompts: dict[str, _ImagePrompt],
    expected: dict[str, list[int]],
    bytes_per_token: int,
    **options: Any,
) -> str:
    """Room for the prompts of the first two, and not for what they generate; or less, where layers with windows give
    blocks back. Of gemma3 nobody is preempted unless the longest comes first."""
    lens = {name: _num_tokens(processor, one) for name, one in prompts.items()}
    longest_first = {name: prompts[name] for name in sorted(prompts, key=lens.__getitem__, reverse=True)}
    options |= {"max_model_len": max(lens.values()) + NUM_TOKENS, "block_size": 2}
    for num_tokens in rooms(lens["one"] + lens["two"] + 4, max(lens.values()) + NUM_TOKENS):
        options["kv_cache_memory"] = num_tokens * bytes_per_token
        with closing(_build(folder, **options)) as cramped:
            # The second time no request waits for an image, so they are computed in this order.
            _generate(cramped, prompts)
            before = cramped.core.scheduler.stats().num_preemptions
            results = _judge(_generate(cramped, longest_first), expected)
            if results != SAME or cramped.core.scheduler.stats().num_preemptions > before:
                return results
    return "was not preempted"


def rooms(most: int, least: int) -> Iterator[int]:
    """``most`` tokens, and less by 2, 4, 8 and so on, down to the last one of its steps above ``least``."""
    yield most
    less, smallest = 2, (most - least - 1) // 2 * 2
    while less < smallest:
        yield most - less
        less *= 2
    if smallest:
        yield most - smallest


def _num_tokens(processor: Any, one: _ImagePrompt) -> int:
    """Tokens of a prompt with those of its images."""
    image_processor = ImageProcessor(processor)
    return len(one.prompt) + sum(len(image_processor.process(image).tokens.token_ids) - 1 for image in one.images)


def _build(folder: Path, **options: Any) -> Engine:
    fields = {"max_num_seqs": 6, "block_size": 8, "num_threads": 1, **options}
    return build_engine(EngineConfig(model=str(folder), **fields), folder)


def _generate(
    engine: Engine, prompts: dict[str, _ImagePrompt], delivered: dict[str, list[int]] | None = None
) -> dict[str, list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    for name, one in prompts.items():
        engine.core.add_request(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=one.prompt,
                sampling_params=params,
                images=[ImageInput.from_bytes(png(image)) for image in one.images],
                output_token_ids=None if delivered is None else delivered[name],
            )
        )
    while engine.core.has_work:
        for output in engine.core.step_fn():
            if output.error is not None:
                raise PenstockError(output.error.message)
            tokens[output.request_id] += output.new_token_ids
    engine.core.check_invariants()
    return tokens


def _judge(tokens: dict[str, list[int]], expected: dict[str, list[int]]) -> str:
    different = [name for name, row in expected.items() if tokens[name] != row]
    return SAME if not different else f"{len(different)} of {len(expected)} differ"
