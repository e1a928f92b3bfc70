"""The compiled kernels against their references, and a machine without a compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.kernels import native
from penstock.kernels.decoder import AttentionGate
from penstock.kernels.decoder.structs import NormKind
from penstock.kernels.gated_activation import ACTIVATIONS, silu_and_mul
from penstock.kernels.gated_activation import reference as silu_reference
from penstock.kernels.kv_cache import CacheSlots, store_kv_cache
from penstock.kernels.kv_cache import reference as kv_reference
from penstock.kernels.mixers import MixerKind
from penstock.kernels.native import build as build_module
from penstock.kernels.native.build import BuildError, build
from penstock.kernels.rms_norm import add_rms_norm, rms_norm
from penstock.kernels.rms_norm import reference as norm_reference
from penstock.kernels.rotary import apply_rotary
from penstock.kernels.rotary import reference as rotary_reference

DTYPES = [torch.float32, torch.bfloat16]
# Of a result that is rounded once against one that is rounded after each operation.
TOLERANCES = {torch.float32: (2e-6, 2e-6), torch.bfloat16: (2e-2, 2e-2)}
ODD_SHAPES = [(1, 8), (7, 41), (63, 1000)]
HAS_COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    rtol, atol = TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", DTYPES)
class TestLayerOps:
    @pytest.mark.parametrize(("num_tokens", "size"), ODD_SHAPES)
    def test_rms_norm(self, num_tokens: int, size: int, dtype: torch.dtype) -> None:
        weight = random(size, dtype=dtype)
        for inputs in (random(num_tokens, size, dtype=dtype), random(num_tokens, 2 * size, dtype=dtype)[:, size:]):
            for own in (weight, weight.float()):
                assert_close(rms_norm(inputs, own, 1e-5), norm_reference.rms_norm(inputs, own, 1e-5))

    def test_rms_norm_of_heads_with_a_weight_each(self, dtype: torch.dtype) -> None:
        heads, weight = random(9, 7, 32, dtype=dtype)[:, 1:6], random(5, 32, dtype=dtype)
        assert_close(rms_norm(heads, weight, 1e-6), norm_reference.rms_norm(heads, weight, 1e-6))

    @pytest.mark.parametrize(("num_tokens", "size"), ODD_SHAPES)
    def test_add_rms_norm(self, num_tokens: int, size: int, dtype: torch.dtype) -> None:
        inputs, residual = random(num_tokens, size, dtype=dtype), random(num_tokens, size, dtype=dtype) * 2
        weight = random(size, dtype=dtype)
        expected = norm_reference.add_rms_norm(inputs, residual, weight, 1e-5)
        for ours, theirs in zip(add_rms_norm(inputs, residual.clone(), weight, 1e-5), expected, strict=True):
            assert_close(ours, theirs)

    @pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), [(1, 1, 2), (9, 7, 42), (63, 5, 128)])
    def test_apply_rotary(self, num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        heads = random(num_tokens, num_heads + 2, head_dim, dtype=dtype)[:, 1:-1]
        angles = random(num_tokens, head_dim // 2, dtype=dtype).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        assert_close(apply_rotary(heads, cos, sin), rotary_reference.apply_rotary(heads, cos, sin))

    @pytest.mark.parametrize(("num_tokens", "size"), ODD_SHAPES)
    def test_silu_and_mul(self, num_tokens: int, size: int, dtype: torch.dtype) -> None:
        gate_up = random(num_tokens, 2 * size, dtype=dtype) * 8
        assert_close(silu_and_mul(gate_up), silu_reference.silu_and_mul(gate_up))

    def test_extreme_gates(self, dtype: torch.dtype) -> None:
        gate_up = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4] + [1.0] * 5], dtype=dtype)
        assert_close(silu_and_mul(gate_up), silu_reference.silu_and_mul(gate_up))

    def test_not_a_number_stays_one(self, dtype: torch.dtype) -> None:
        spoiled = torch.full((2, 16), float("nan"), dtype=dtype)
        assert silu_and_mul(spoiled).isnan().all()
        assert rms_norm(spoiled, torch.ones(16, dtype=dtype), 1e-5).isnan().all()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_store_kv_cache(dtype: torch.dtype) -> None:
    heads = random(11, 5, 8, dtype=dtype)
    key, value = heads[:, 1:3], heads[:, 3:]
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(0))[:11]
    slots[::4] = -1
    caches = [torch.full((5, 4, 2, 8), 7.0, dtype=dtype) for _ in range(4)]
    store_kv_cache(key, value, caches[0], caches[1], slots)
    kv_reference.store_kv_cache(key, value, CacheSlots(caches[2], caches[3], slots))
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])


@pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")
def test_compiled_libraries_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one source, because the others take long; ``compiled`` uses all."""
    monkeypatch.setattr(build_module, "_SOURCES", ("base/parallel.cpp",))
    path = build(tmp_path)
    compiled_at = path.stat().st_mtime_ns
    assert build(tmp_path) == path
    assert path.stat().st_mtime_ns == compiled_at
    assert set(tmp_path.iterdir()) == {path, path.with_suffix(".lock")}


# Reports that it compiles, waits for permission to end, and counts its links.
_COMPILER = """#!/bin/sh
case "$*" in
*--version*) exit ;;
*-shared*) echo linked >> "$0.linked" ;;
*) echo begun > "$0.begun"; read nothing < "$0.go" ;;
esac
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""


def test_a_process_waits_for_a_library_that_another_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "_SOURCES", ("base/parallel.cpp",))
    compiler, begun, go = (tmp_path / name for name in ("c++", "c++.begun", "c++.go"))
    compiler.write_text(_COMPILER)
    compiler.chmod(0o700)
    os.mkfifo(begun)
    os.mkfifo(go)
    monkeypatch.setenv("CXX", str(compiler))
    with ThreadPoolExecutor() as threads:
        first = threads.submit(build, tmp_path / "kept")
        with begun.open() as log:
            assert log.readline() == "begun\n"
            second = threads.submit(build, tmp_path / "kept")
            with go.open("w") as gate:
                # A line for each, if both compile.
                gate.write("\n\n")
                gate.flush()
                assert first.result() == second.result()
    assert (tmp_path / "c++.linked").read_text() == "linked\n"


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_that_works_the_references_run(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(BuildError, match=compiler):
        build(tmp_path)
    was_loaded = native.is_loaded()
    native.unload()
    reason = native.load(tmp_path)
    assert reason is not None
    assert compiler in reason
    assert not native.is_loaded()
    inputs = random(3, 8, dtype=torch.float32)
    weight = torch.ones(8)
    assert torch.equal(rms_norm(inputs, weight, 1e-5), norm_reference.rms_norm(inputs, weight, 1e-5))
    monkeypatch.undo()
    if was_loaded:
        native.load()


def names_in_library(header: str, enum: str) -> list[str]:
    """Return the names of a C++ enum whose values count from 0."""
    text = (Path(build_module.__file__).parent / header).read_text()
    body = re.search(rf"enum class {enum} : int64_t {{([^}}=]*)}};", text)
    assert body is not None
    return [name.strip() for name in body[1].split(",")]


@pytest.mark.parametrize(
    ("header", "enum"),
    [("decoder/gates.h", AttentionGate), ("decoder/layer_switches.h", NormKind), ("decoder/mixers.h", MixerKind)],
)
def test_enums_have_the_names_and_values_of_the_compiled_library(header: str, enum: type[IntEnum]) -> None:
    assert names_in_library(header, enum.__name__) == [member.name for member in enum]
    assert list(enum) == list(range(len(enum)))


def test_activations_have_the_order_of_the_compiled_library() -> None:
    assert [name.lower() for name in names_in_library("decoder/layer_switches.h", "Activation")] == list(ACTIVATIONS)


def test_the_portable_driver_matches_the_headers() -> None:
    """``make portable`` compiles it for processors whose compilers few machines have."""
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    driver = Path(__file__).parents[1] / "portable" / "driver.cpp"
    headers = Path(build_module.__file__).parent
    command = [compiler, "-std=c++17", "-fsyntax-only", "-Wno-psabi", "-I", str(headers), str(driver)]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
