"""A decoder in one compiled call gives what the general way gives, and a token the same bits in any company."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels import native
from penstock.kernels.dispatch import KernelInputError
from penstock.kernels.paged_attention import PagedBatch
from penstock.shared.errors import ModelLoadError
from penstock.worker.models.forward import ModelInput
from penstock.worker.models.lean.forward import LeanForward
from penstock.worker.models.lean.layers.feed_forward import OwnMlp
from penstock.worker.models.lean.native import NativeForward, make_native
from penstock.worker.models.loading.preparing import use_eight_bit_cache
from penstock.worker.models.modes.packed import PackedForward
from penstock.worker.models.placing.packed_linear import pack_linear_layers

from ...native_library import native_as_before
from .lean_models import (
    ALL_EXPERTS,
    BLOCK_SIZE,
    COMPILED_ALONE,
    MIXTURES,
    NUM_BLOCKS,
    SETTINGS,
    VARIANTS,
    logits_of,
    make_model,
    poison,
    steps,
)

DTYPES = [torch.float32, torch.bfloat16]
HAS_COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    """The library in use on two threads, compiled once for all tests and engines of this machine."""
    with native_as_before():
        assert native.load() is None
        native.set_num_threads(2)
        yield
        native.set_num_threads(1)


def native_forward(
    variant: str, dtype: torch.dtype, quantization: str | None = None, *, in_bytes: bool = False, **changed: Any
) -> NativeForward:
    """Return the forward of a variant; ``in_bytes`` says whether its cache is in int8."""
    lean = LeanForward(make_model(variant, dtype, **changed), SETTINGS)
    if in_bytes:
        use_eight_bit_cache(lean, "int8", 97, 64)
    pack_linear_layers(lean.network, quantization)
    forward = make_native(lean, BLOCK_SIZE)
    assert isinstance(forward, NativeForward)
    return forward


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_logits_are_those_of_the_general_way(variant: str, dtype: torch.dtype) -> None:
    _check_logits(variant, dtype, **(ALL_EXPERTS if variant in MIXTURES and dtype is torch.bfloat16 else {}))


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_heads_may_be_as_wide_as_gemmas(dtype: torch.dtype) -> None:
    _check_logits("llama, with biases, wide heads and scaled rope", dtype, head_dim=512)


def _check_logits(variant: str, dtype: torch.dtype, **changed: Any) -> None:
    expected = logits_of(PackedForward(make_model(variant, torch.float32, **changed), SETTINGS))
    theirs = expected
    if dtype is not torch.float32:
        theirs = logits_of(PackedForward(make_model(variant, dtype, **changed), SETTINGS))
    actual = logits_of(native_forward(variant, dtype, **changed))
    assert {ours.dtype for ours in actual} == {torch.float32}
    truth, other, ours = (torch.cat([logits.float() for logits in found]) for found in (expected, theirs, actual))
    if dtype is torch.float32:
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-4)
    # Of two ways in bfloat16 ours may be the better one; it is not to be much worse.
    assert (ours - truth).norm() <= 2 * (other - truth).norm() + 1e-5 * truth.norm()


# Variants for each way to attend, since nothing else of a layer reads the cache.
ATTENDING = ("llama", "mistral, with a window", "gemma2", "gpt oss", "wide heads")


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        *((variant, torch.float32) for variant in (*VARIANTS, "wide heads")),
        *((variant, torch.bfloat16) for variant in ATTENDING),
    ],
)
@torch.inference_mode()
def test_a_cache_in_bytes_is_that_of_the_general_way(variant: str, dtype: torch.dtype) -> None:
    """Both round the same numbers. In float32, few fall on the other side of half a step because of their last bits."""
    changed: dict[str, Any] = ALL_EXPERTS if variant in MIXTURES else {}
    if variant == "wide heads":
        variant, changed = "llama, with biases, wide heads and scaled rope", {"head_dim": 512}
    packed, plain = (PackedForward(make_model(variant, dtype, **changed), SETTINGS) for _ in range(2))
    use_eight_bit_cache(packed, "int8", 97, 64)
    native = native_forward(variant, dtype, in_bytes=True, **changed)
    ours, theirs, exact = (torch.cat(logits_of(forward)).float() for forward in (native, packed, plain))
    rounding = (theirs - exact).norm()
    assert 0 < (ours - exact).norm() <= 2 * rounding < 0.5 * exact.norm()
    if dtype is torch.float32:
        assert (ours - theirs).norm() < 0.3 * rounding


def test_experts_without_the_library_are_the_models_own() -> None:
    native.unload()
    lean = LeanForward(make_model("mixtral", torch.float32), SETTINGS)
    assert any(isinstance(part, OwnMlp) for part in lean.network.modules())


@pytest.mark.parametrize("variant", COMPILED_ALONE)
def test_experts_that_the_library_alone_has_leave_a_model_packed_without_it(variant: str) -> None:
    native.unload()
    with pytest.raises(ModelLoadError, match="not one part, but mlp, router, experts"):
        LeanForward(make_model(variant, torch.float32), SETTINGS)


def test_the_caches_of_the_general_way_are_released() -> None:
    lean = LeanForward(make_model("llama", torch.float32), SETTINGS)
    lean.allocate(NUM_BLOCKS, BLOCK_SIZE, 1, torch.device("cpu"))
    pack_linear_layers(lean.network)
    assert len(lean.caches) > 0
    NativeForward(lean)
    assert len(lean.caches) == 0


def test_without_the_library_the_layers_in_python_stay() -> None:
    lean = LeanForward(make_model("llama", torch.float32), SETTINGS)
    pack_linear_layers(lean.network)
    native.unload()
    assert make_native(lean, BLOCK_SIZE) is lean


def test_a_block_of_an_odd_number_of_tokens_goes_the_longer_way() -> None:
    lean = LeanForward(make_model("llama", torch.float32), SETTINGS)
    pack_linear_layers(lean.network)
    assert make_native(lean, 5) is lean
    with pytest.raises(KernelInputError, match="even number of tokens, got 5"):
        NativeForward(lean).allocate(4, 5, 1, torch.device("cpu"))


@pytest.mark.parametrize("variant", ["llama", "mistral, with a window", "gemma4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_bytes", [False, True])
@torch.inference_mode()
def test_unwritten_cache_slots_never_affect_results(*, variant: str, dtype: torch.dtype, in_bytes: bool) -> None:
    forward = native_forward(variant, dtype, in_bytes=in_bytes)
    with_eight = logits_of(forward, 8)
    for block_size in (4, 6, 16, 48):
        expected = logits_of(forward, block_size)
        assert all(map(torch.equal, expected, with_eight)), f"the size of blocks shows in the bits: {block_size}"
        forward.allocate(NUM_BLOCKS, block_size, 3, torch.device("cpu"))
        poison(forward.caches)
        for step, before in zip(steps(block_size), expected, strict=True):
            assert torch.equal(forward.run(step), before), block_size


@pytest.mark.parametrize("variant", ["llama", "gemma4", "qwen2 moe"])
def test_the_parts_of_a_block_are_adjacent(variant: str) -> None:
    """Else the first block of each tensor takes a huge page."""
    forward = native_forward(variant, torch.bfloat16)
    forward.allocate(NUM_BLOCKS, BLOCK_SIZE, 3, torch.device("cpu"))
    assert len(forward.caches) > 2
    starts = [cache.data_ptr() for cache in forward.caches]
    end = max(cache[0].data_ptr() + cache[0].nbytes for cache in forward.caches)
    block_bytes = sum(cache[0].nbytes for cache in forward.caches)
    assert end - min(starts) == block_bytes
    assert {cache[1].data_ptr() - start for cache, start in zip(forward.caches, starts, strict=True)} == {block_bytes}


def alone(step: ModelInput, request: int, start: int, end: int) -> ModelInput:
    """Tokens ``start .. end`` of one request of ``step``."""
    first = sum(step.batch.query_lens[:request])
    chosen = slice(first + start, first + end)
    batch = PagedBatch(
        step.batch.block_table[request : request + 1],
        step.batch.slot_mapping[chosen],
        [end - start],
        [step.batch.seq_lens[request] - step.batch.query_lens[request] + end],
        BLOCK_SIZE,
    )
    tokens = step.token_ids[chosen]
    return replace(
        step, token_ids=tokens, positions=step.positions[chosen], logit_rows=torch.arange(len(tokens)), batch=batch
    )


@pytest.mark.parametrize(
    ("variant", "quantization"),
    [
        *(("llama", None), ("llama", "int4"), ("mistral, with a window", None), ("gemma2", None), ("cohere", None)),
        *(("starcoder2", None), ("olmo2", "int4"), ("qwen2 moe", None), ("gpt oss", "int8")),
        ("llama", "int4-mixed"),
        ("gpt oss", "int4-mixed"),
        *(("gemma4", None), ("gemma4, whose keys are values", None)),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_token_has_the_same_bits_in_any_company(variant: str, quantization: str | None, dtype: torch.dtype) -> None:
    forward = native_forward(variant, dtype, quantization, in_bytes=quantization == "int4")
    forward.allocate(NUM_BLOCKS, BLOCK_SIZE, 3, torch.device("cpu"))
    together = [forward.run(replace(step, logit_rows=torch.arange(len(step.token_ids)))) for step in steps()]
    for num_threads in (1, 3):
        native.set_num_threads(num_threads)
        forward.allocate(NUM_BLOCKS, BLOCK_SIZE, 3, torch.device("cpu"))
        for step, logits in zip(steps(), together, strict=True):
            parts: list[Tensor] = []
            for request, num_tokens in enumerate(step.batch.query_lens):
                cuts = sorted({0, num_tokens // 3, num_tokens})
                parts += [forward.run(alone(step, request, a, b)) for a, b in pairwise(cuts)]
            assert torch.equal(torch.cat(parts), logits), num_threads
            # Behind the last layer that stores keys and values nobody else is computed.
            assert torch.equal(forward.run(step), logits[step.logit_rows]), num_threads


def with_ends(step: ModelInput) -> ModelInput:
    """Tokens 2 to 6 of each request see each other, and so do the last three of a chunk of 13."""
    ends = step.positions + 1
    for start, end in ((2, 7), (10, 13)):
        ends[(step.positions >= start) & (step.positions < end)] = end
    computed = torch.tensor(step.batch.seq_lens).repeat_interleave(torch.tensor(step.batch.query_lens))
    step.batch.visible_ends = torch.minimum(ends, computed)
    return step


@pytest.mark.parametrize("variant", ["llama", "mistral, with a window", "gemma2", "gemma4"])
@torch.inference_mode()
def test_bidirectional_image_tokens_match_the_general_forward(variant: str) -> None:
    found: list[list[Tensor]] = []
    for forward in (
        PackedForward(make_model(variant, torch.float32), SETTINGS),
        native_forward(variant, torch.float32),
        LeanForward(make_model(variant, torch.float32), SETTINGS),
    ):
        forward.allocate(NUM_BLOCKS, BLOCK_SIZE, 3, torch.device("cpu"))
        if isinstance(forward, NativeForward):
            poison(forward.caches)
        found.append([forward.run(with_ends(step)) for step in steps()])
    for packed, compiled, lean, plain in zip(*found, logits_of(native_forward(variant, torch.float32)), strict=True):
        torch.testing.assert_close(compiled, packed.float(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lean.float(), packed.float(), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(plain, compiled, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_embeddings_can_be_passed_as_inputs() -> None:
    forward = native_forward("qwen2", torch.float32)
    expected = logits_of(forward)
    forward.allocate(NUM_BLOCKS, BLOCK_SIZE, 3, torch.device("cpu"))
    for step, before in zip(steps(), expected, strict=True):
        given = replace(
            step, token_ids=torch.zeros_like(step.token_ids), inputs_embeds=forward.network.embed_tokens(step.token_ids)
        )
        assert torch.equal(forward.run(given), before)


@torch.inference_mode()
def test_layers_that_store_nothing_take_no_room() -> None:
    lean = LeanForward(make_model("gemma4", torch.float32), SETTINGS)
    packed = PackedForward(make_model("gemma4", torch.float32), SETTINGS)
    assert not lean.takes_embeds  # its layers look at token ids again
    assert [call.source is None for call in lean.attention_calls] == [True] * 4 + [False] * 2
    # Two of its six layers: one of heads of 16, one of 32.
    assert packed.bytes_per_token - lean.bytes_per_token == 2 * 2 * (16 + 32) * 4
    forward = native_forward("gemma4", torch.float32)
    for one in (lean, forward):
        one.allocate(NUM_BLOCKS, BLOCK_SIZE, 3, torch.device("cpu"))
        assert len(one.caches) == 2 * 4
