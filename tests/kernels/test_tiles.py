"""Products and attention on tile registers: emulated in plain C++ anywhere, and by the instructions where they are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from penstock.kernels import native
from penstock.kernels.decoder import Decoder, DecoderBatch, DecoderWeights, LayerWeights, NormWeights
from penstock.kernels.linear import (
    PackedWeight,
    linear,
    pack_weight,
    quantize_weight,
    quantize_weight_to_nibbles,
    unpack_weight,
)
from penstock.kernels.native.build import build, default_cache_folder

from ..processes import DEADLINE_S
from .test_native import HAS_COMPILER, random

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")

# Outputs that fill no panel, half of one, more than one; inputs of one step and of several.
SHAPES = [(1, 64), (33, 128), (100, 320), (150, 64)]
# Less than a tile of rows, one, more than one, a block of two, a block and a rest.
NUM_ROWS = (1, 16, 19, 32, 70)
BFLOAT16 = torch.bfloat16
PACK = {"plain": pack_weight, "bytes": quantize_weight, "nibbles": quantize_weight_to_nibbles}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restore the library after a test has loaded another one."""
    was_loaded = native.is_loaded()
    yield
    native.set_num_threads(1)
    native.load() if was_loaded else native.unload()


def load_emulation() -> None:
    assert native.load(emulates_tiles=True) is None
    library = native.loaded()
    assert library is not None
    assert library.instructions == "emulated amx"


def load_instructions() -> None:
    """Skip the test where the processor has no tiles."""
    assert native.load() is None
    library = native.loaded()
    assert library is not None
    if library.instructions != "amx":
        pytest.skip(f"this processor has {library.instructions}")


def packed_weight(num_outputs: int, num_inputs: int, kind: str) -> PackedWeight:
    return PACK[kind](random(num_outputs, num_inputs, dtype=BFLOAT16), random(num_outputs, dtype=BFLOAT16))


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_a_product_is_right_and_a_row_has_its_bits_in_any_company(num_outputs: int, num_inputs: int, kind: str) -> None:
    load_emulation()
    packed = packed_weight(num_outputs, num_inputs, kind)
    rows = random(max(NUM_ROWS), 2 * num_inputs, dtype=BFLOAT16)[:, num_inputs:]
    together = linear(rows, packed)
    assert packed.bias is not None
    expected = rows.double() @ unpack_weight(packed).double().T + packed.bias[:num_outputs].double()
    assert (together.double() - expected).norm() < (0.005 if kind == "plain" else 0.02) * expected.norm()
    for num_rows in NUM_ROWS:
        for num_threads in (1, 2):
            native.set_num_threads(num_threads)
            assert torch.equal(linear(rows[-num_rows:], packed), together[-num_rows:])


def test_the_number_of_rows_does_not_change_the_order_of_summation() -> None:
    """The exact results are 0, so the rounding errors show the order in which products were summed."""
    load_emulation()
    half, rows = random(100, 160, dtype=BFLOAT16), random(70, 160, dtype=BFLOAT16).repeat(1, 2)
    packed = pack_weight(torch.cat([half, -half], 1))
    together = linear(rows, packed)
    assert (together != 0).float().mean() > 0.5
    for num_rows in NUM_ROWS:
        assert torch.equal(linear(rows[-num_rows:], packed), together[-num_rows:])


@pytest.mark.parametrize("kind", PACK)
def test_emulation_and_instructions_agree_on_products(kind: str) -> None:
    load_instructions()
    products: list[list[Tensor]] = []
    for load in (load_instructions, load_emulation):
        load()
        products.append([])
        for num_outputs, num_inputs in SHAPES:
            packed = packed_weight(num_outputs, num_inputs, kind)
            rows = random(max(NUM_ROWS), num_inputs, dtype=BFLOAT16)
            rows[3] *= 1e-38  # denormal products
            rows[5, 0] = torch.inf
            products[-1] += [linear(rows[:num_rows], packed) for num_rows in NUM_ROWS]
    assert all(torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7)) for ours, theirs in zip(*products, strict=True))


def test_four_bits_have_the_same_bits_with_tiles_and_without() -> None:
    """Sums of bytes are integers, so the method may depend on the number of rows."""
    rows = random(max(NUM_ROWS), 130, dtype=BFLOAT16)
    products: list[Tensor] = []
    for uses_tiles in (False, True):
        assert native.load(emulates_tiles=uses_tiles, uses_tiles=uses_tiles) is None
        packed = packed_weight(100, 130, "nibbles")
        products += [torch.cat([linear(rows[:19], packed), linear(rows[19:20], packed), linear(rows[20:], packed)])]
    assert torch.equal(*products)


def test_of_the_dtype_of_inputs_that_do_not_fill_a_tile_nothing_changes() -> None:
    """They are multiplied on vectors for any number of rows."""
    load_emulation()
    packed, rows = pack_weight(random(70, 48, dtype=BFLOAT16)), random(33, 48, dtype=BFLOAT16)
    together = linear(rows, packed)
    assert native.load() is None
    assert torch.equal(linear(rows, packed), together)


HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 6, 2, 96, 64
NUM_POSITIONS = 160


def one_layer(window: int | None, dtype: torch.dtype = BFLOAT16) -> DecoderWeights:
    """Return a decoder of one layer whose logits show the attention output."""

    def weight(num_outputs: int, num_inputs: int) -> PackedWeight:
        return pack_weight((random(num_outputs, num_inputs, dtype=BFLOAT16) * num_inputs**-0.5).to(dtype))

    norm = NormWeights(torch.ones(HIDDEN, dtype=dtype), 1e-5)
    layer = LayerWeights(
        input_norm=norm,
        mlp_norm=norm,
        query_norm=None,
        key_norm=None,
        qkv=weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
        output=weight(HIDDEN, HEADS * HEAD_DIM),
        gate_up=weight(128, HIDDEN),
        down=weight(HIDDEN, 64),
        scale=0.3,
        window=window,
    )
    embeddings = random(50, HIDDEN, dtype=BFLOAT16).to(dtype)
    return DecoderWeights(embeddings, (layer,), norm, weight(50, HIDDEN), HEADS, KV_HEADS, HEAD_DIM)


def logits_of(
    weights: DecoderWeights,
    block_size: int,
    cuts: list[int],
    ends: Tensor | None = None,
    cache_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the logits of one request with ``cuts[-1]`` tokens, computed in steps that end at each of ``cuts``."""
    decoder = Decoder(weights)
    num_blocks = -(-NUM_POSITIONS // block_size)
    table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    dtype = weights.embeddings.dtype
    shape = decoder.cache_shape(num_blocks, block_size, dtype=cache_dtype)
    # Slots without a stored token never contribute to a result. All bits of a scale make it NaN.
    poison = -1 if cache_dtype == torch.int8 else torch.nan
    keys, values = (torch.full(shape, poison, dtype=cache_dtype or dtype) for _ in range(2))
    decoder.use_cache([keys], [values], block_size)
    angles = torch.arange(NUM_POSITIONS)[:, None] / 10 ** torch.arange(HEAD_DIM // 2).div(16)
    cos, sin = (of_angles(angles).repeat(1, 2).to(dtype).float() for of_angles in (torch.cos, torch.sin))
    token_ids = torch.randint(0, 50, (NUM_POSITIONS,), generator=torch.Generator().manual_seed(1))
    logits: list[Tensor] = []
    for start, end in zip([0, *cuts], cuts, strict=False):
        positions = torch.arange(start, end)
        batch = DecoderBatch(
            token_ids=token_ids[start:end],
            positions=positions,
            slot_mapping=table[positions // block_size] * block_size + positions % block_size,
            block_table=table[None],
            query_lens=torch.tensor([end - start]),
            seq_lens=torch.tensor([end]),
            logit_rows=torch.arange(end - start),
            angles=[(cos, sin)],
            visible_ends=None if ends is None else ends[start:end],
        )
        logits.append(decoder.run(batch))
    return torch.cat(logits)


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
def test_attention_has_the_same_bits_however_a_request_is_cut_and_in_blocks_of_any_size(
    window: int | None, cache_dtype: torch.dtype | None
) -> None:
    load_emulation()
    weights = one_layer(window)
    whole = logits_of(weights, 16, [150], cache_dtype=cache_dtype)
    assert not whole.isnan().any()
    native.set_num_threads(2)
    for block_size, cuts in ((6, [40, 41, 150]), (48, [1, 97, 98, 150]), (16, [16, 31, 149, 150])):
        assert torch.equal(logits_of(weights, block_size, cuts, cache_dtype=cache_dtype), whole)


@pytest.mark.parametrize("window", [None, 37])
def test_tokens_that_attend_to_each_other_match_on_tiles_and_vectors(window: int | None) -> None:
    load_emulation()
    ends = torch.arange(1, 151)
    for start, end in ((23, 62), (63, 64), (70, 125)):
        ends[start:end] = end
    weights = one_layer(window)
    whole = logits_of(weights, 16, [150], ends)
    for block_size, cuts in ((6, [23, 69, 150]), (16, [62, 126, 150])):
        assert torch.equal(logits_of(weights, block_size, cuts, ends), whole)
    assert not torch.equal(logits_of(weights, 16, [150]), whole)
    exact = logits_of(one_layer(window, torch.float32), 16, [150], ends)
    assert (whole - exact).norm() <= 0.02 * exact.norm()


@pytest.mark.parametrize("window", [None, 37])
def test_attention_is_that_of_float32(window: int | None) -> None:
    """Attention in float32 runs on vectors."""
    load_emulation()
    ours, expected = (logits_of(one_layer(window, dtype), 16, [150]) for dtype in (BFLOAT16, torch.float32))
    assert (ours - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("window", [None, 37])
def test_a_cache_in_bytes_is_read_alike_on_tiles_and_vectors(window: int | None) -> None:
    load_emulation()
    on_tiles = logits_of(one_layer(window), 16, [150], cache_dtype=torch.int8)
    assert native.load() is None
    on_vectors, exact = (logits_of(one_layer(window), 16, [150], cache_dtype=kind) for kind in (torch.int8, None))
    assert 0 < (on_tiles - exact).norm() < 0.02 * exact.norm()
    assert (on_tiles - on_vectors).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
def test_emulation_and_instructions_agree_on_attention(cache_dtype: torch.dtype | None) -> None:
    load_instructions()
    by_instructions = logits_of(one_layer(37), 16, [60, 150, 151], cache_dtype=cache_dtype)
    load_emulation()
    assert torch.equal(logits_of(one_layer(37), 16, [60, 150, 151], cache_dtype=cache_dtype), by_instructions)


_LOAD = "import ctypes, os, sys; library = ctypes.CDLL(sys.argv[1])"
# struct sigaltstack of Linux: address, flags, size.
_SMALL_STACK = """
class Stack(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(2048)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 2048)), None) == 0
"""
_FORK = """
assert library.request_tiles() == 0
if child := os.fork():
    os.waitpid(child, 0)
    os._exit(0)
"""


@pytest.mark.parametrize(("before", "expected"), [("", "0"), (_SMALL_STACK, "28"), (_FORK, "0")])
def test_tiles_are_requested_from_the_kernel(before: str, expected: str) -> None:
    """It refuses (28 is ENOSPC) with an alternate signal stack that is too small; a forked process may use them."""
    load_instructions()
    library = build(default_cache_folder())
    program = f"{_LOAD}\n{before}\nprint(library.request_tiles())"
    command = [sys.executable, "-c", program, str(library)]
    assert (
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout.strip()
        == expected
    )
