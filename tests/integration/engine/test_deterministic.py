"""In deterministic mode the logits of a request have the same bits in any company, however its work is cut up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels import native
from penstock.shared.errors import ConfigurationError
from penstock.shared.messages.requests import EngineCoreRequest
from penstock.worker.config.engine_config import EngineConfig
from penstock.worker.engine.composition import build_engine
from penstock.worker.engine.core.engine_core import EngineCore
from penstock.worker.engine.execution import model_runner
from penstock.worker.engine.sampling.sampler import SamplingRows, sample
from penstock.worker.models.forward import ModelInput
from penstock.worker.models.loaded import LoadedModel
from penstock.worker.models.loading.fixed_shapes import choose_tile_sizes, is_invariant_in_any_size
from penstock.worker.models.loading.loader import load_model

from ...conftest import DEMO_MODEL
from ...native_library import native_as_before
from .harness import generate, request

NUM_TOKENS = 12

Pairs = Iterator[tuple[dict[str, list[int]], dict[str, list[int]]]]


class SampledLogits:
    """Stands before the sampler and keeps what it is given, by request (they have different seeds) and position."""

    def __init__(self) -> None:
        self.bits: dict[tuple[int, int], set[bytes]] = defaultdict(set)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        for row, seed, position in zip(logits, rows.seeds.tolist(), rows.positions.tolist(), strict=True):
            self.bits[seed, position].add(row.float().numpy().tobytes())
        return sample(logits, rows)

    @property
    def num_different(self) -> int:
        """Tokens whose logits were not the same every time."""
        return sum(len(bits) > 1 for bits in self.bits.values())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> SampledLogits:
    logits = SampledLogits()
    monkeypatch.setattr(model_runner, "sample", logits.sample)
    return logits


def make_requests(prompts: list[list[int]], num_delivered: int, whole: dict[str, list[int]]) -> list[EngineCoreRequest]:
    """Greedy and seeded ones in turn, with the first tokens of ``whole`` delivered. Seed 0 is the warm-up's."""
    return [
        request(str(i), prompt, whole[str(i)][:num_delivered], seed=i + 1, temperature=i % 2, max_tokens=NUM_TOKENS)
        for i, prompt in enumerate(prompts)
    ]


def disturbed(roomy: EngineCore, cramped: EngineCore, prompts: list[list[int]], every: int = 1) -> Pairs:
    """Generate undisturbed, each request alone, and again in other ways; yields what should be and what is."""
    nothing = {str(i): [] for i in range(len(prompts))}
    whole = {}
    for r in make_requests(prompts, 0, nothing):
        whole |= generate(roomy, [r])
    for num_delivered in range(0, NUM_TOKENS, every):
        resumed = make_requests(prompts, num_delivered, whole)
        rest = {key: tokens[num_delivered:] for key, tokens in whole.items()}
        yield rest, generate(roomy, resumed)
        yield rest, generate(cramped, resumed[::-1])
        for r in resumed[:2]:
            yield {r.request_id: rest[r.request_id]}, generate(cramped, [r])
    assert cramped.scheduler.stats().num_preemptions > 0


# So that everything is computed again, as on another engine.
UNCACHED = {"enable_prefix_caching": False}
# The cramped engine preempts, and prefills long prompts in chunks of a few tokens.
CRAMPED = {"num_blocks": 20, "block_size": 4, "max_model_len": 80, "max_num_seqs": 6, "max_num_batched_tokens": 8}


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """No library, for what an engine without it does; ``UNCOMPILED`` has engines of the test do without."""
    with native_as_before():
        native.unload()
        yield


UNCOMPILED: dict[str, Any] = {"native_kernels": False}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("name", "dtype", "every", "library"),
    [
        ("llama", "float32", 3, {}),
        ("llama", "bfloat16", 4, {}),
        ("qwen3", "bfloat16", 3, {}),
        ("gemma2", "float32", 4, {}),
        ("gpt_oss", "float32", 7, {}),
        ("gpt_oss", "float32", NUM_TOKENS, UNCOMPILED),  # each of its tokens is computed alone
    ],
)
def test_same_logits_however_disturbed(
    name: str,
    dtype: str,
    every: int,
    library: dict[str, Any],
    make_core: Callable[..., EngineCore],
    prompts: list[list[int]],
    seen: SampledLogits,
) -> None:
    options = {"dtype": dtype, "deterministic": True, **UNCACHED, **library}
    roomy = make_core(name, **options)
    cramped = make_core(name, **options, **cramped_options(dtype))
    for expected, actual in disturbed(roomy, cramped, prompts, every):
        assert actual == expected
    assert seen.num_different == 0
    assert len(seen.bits) >= len(prompts) * NUM_TOKENS


@pytest.mark.parametrize(("name", "dtype"), [("llama", "float32"), ("llama", "bfloat16"), ("gemma2", "float32")])
def test_same_logits_after_cached_blocks(
    name: str, dtype: str, make_core: Callable[..., EngineCore], prompts: list[list[int]], seen: SampledLogits
) -> None:
    options: dict[str, Any] = {"dtype": dtype, "deterministic": True}
    nothing = {str(i): [] for i in range(len(prompts))}
    expected = generate(make_core(name, **options, **UNCACHED), make_requests(prompts, 0, nothing))
    roomy, cramped = make_core(name, **options), make_core(name, **options, **cramped_options(dtype))
    for rest, actual in disturbed(roomy, cramped, prompts, every=3):
        assert actual == rest
        assert all(expected[key][-len(tokens) :] == tokens for key, tokens in rest.items())
    assert seen.num_different == 0
    assert roomy.scheduler.stats().prefix_cache_hits > 100
    assert cramped.scheduler.stats().prefix_cache_hits > 0


def cramped_options(dtype: str) -> dict[str, Any]:
    """``num_blocks`` counts in float32."""
    return CRAMPED | {"num_blocks": CRAMPED["num_blocks"] // (4 // getattr(torch, dtype).itemsize)}


def demo_core(**options: Any) -> EngineCore:
    config = EngineConfig(model=str(DEMO_MODEL), num_threads=1, **options)
    return build_engine(config, DEMO_MODEL).core


def test_same_logits_of_the_demo_model(prompts: list[list[int]], seen: SampledLogits) -> None:
    # Up to 172 tokens: attention goes over several tiles of keys. Room for 76 blocks of 4 tokens of 2,048 bytes.
    small = {"block_size": 4, "max_model_len": 256, "kv_cache_memory": 76 * 4 * 2048, "max_num_batched_tokens": 70}
    roomy = demo_core(deterministic=True, kv_cache_memory=1 << 24, **UNCACHED)
    cramped = demo_core(deterministic=True, **small, **UNCACHED)
    for expected, actual in disturbed(roomy, cramped, [prompt * 4 for prompt in prompts], every=2):
        assert actual == expected
    assert seen.num_different == 0


@pytest.mark.usefixtures("uncompiled")
def test_the_ordinary_runner_does_not_promise_that(
    make_core: Callable[..., EngineCore], prompts: list[list[int]], seen: SampledLogits
) -> None:
    # A model that runs in one compiled call keeps its bits anyway.
    options = {**UNCACHED, **UNCOMPILED}
    for _ in disturbed(make_core("gpt_oss", **options), make_core("gpt_oss", **CRAMPED, **options), prompts, every=7):
        pass
    assert seen.num_different > len(prompts)


@pytest.fixture
def load(model_folder: Callable[[str], Path]) -> Callable[..., LoadedModel]:
    def load_deterministic(name: str, dtype: str = "float32", **options: Any) -> LoadedModel:
        folder = model_folder(name)
        config = EngineConfig(model=str(folder), deterministic=True, num_threads=1, dtype=dtype, **options)
        return load_model(config, folder)

    return load_deterministic


@pytest.mark.usefixtures("uncompiled")
def test_tokens_of_a_model_with_experts_go_alone(load: Callable[..., LoadedModel]) -> None:
    assert choose_tile_sizes(load("gpt_oss")) == (1,)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_of_other_models_go_in_tiles(dtype: str, load: Callable[..., LoadedModel]) -> None:
    assert choose_tile_sizes(load("llama", dtype)) == (8, 32)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_compiled_decoder_needs_no_tiles_unless_it_loses_bits(
    dtype: str, load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_invariant_in_any_size(load("gpt_oss", dtype))
    model = load("llama", dtype)
    assert is_invariant_in_any_size(model)
    with monkeypatch.context() as patch:
        add_to_logits(patch, model, lambda num_tokens: torch.full((num_tokens,), num_tokens * 0.1))
        assert not is_invariant_in_any_size(model)
    with monkeypatch.context() as patch:
        # From row 40 on a row's place matters.
        add_to_logits(patch, model, lambda num_tokens: torch.arange(num_tokens).ge(40) * 0.1)
        assert not is_invariant_in_any_size(model)


def add_to_logits(monkeypatch: pytest.MonkeyPatch, model: LoadedModel, make_noise: Callable[[int], Tensor]) -> None:
    """Spoil every forward of ``n`` tokens by ``make_noise(n)``, added to the logits' rows."""
    run = model.forward.run

    def spoilt(step: ModelInput) -> Tensor:
        return run(step) + make_noise(len(step.token_ids))[step.logit_rows, None]

    monkeypatch.setattr(model.forward, "run", spoilt)


def test_sizes_that_give_different_bits_are_not_mixed(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("llama")
    with monkeypatch.context() as patch:
        add_to_logits(patch, model, lambda num_tokens: torch.full((num_tokens,), num_tokens * 1e-4))
        assert choose_tile_sizes(model) == (32,)
    with monkeypatch.context() as patch:
        # From row 20 on a row's place matters.
        add_to_logits(patch, model, lambda num_tokens: torch.arange(num_tokens).ge(20) * 1e-4)
        assert choose_tile_sizes(model) == (8,)
    with monkeypatch.context() as patch:
        add_to_logits(patch, model, lambda num_tokens: torch.arange(num_tokens) * 1e-4)
        assert choose_tile_sizes(model) == (1,)


def test_a_model_that_cannot_is_refused_by_name(
    load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(0)
    model = load("llama")
    add_to_logits(monkeypatch, model, lambda num_tokens: torch.from_numpy(generator.normal(size=num_tokens)).float())
    with pytest.raises(ConfigurationError, match=r"--deterministic cannot be kept.*LlamaForCausalLM.*start without"):
        choose_tile_sizes(model)
