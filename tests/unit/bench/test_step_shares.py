"""Samples of ``perf`` by the parts of a step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.kernels import native
from penstock.ops.lab.bench.step_shares import shares_of

# Sources of products for all processors: vectors, wide vectors, tiles, blocks of files.
PRODUCTS = ("vector_product.h", "wide_product.h", "tile_product.cpp", "tiles.h", "block_product.cpp", "block_product.h")
ATTENTION = ("vector_attention.h", "tile_attention.h", "softmax.h")

REPORT = """# To display the perf.data header info, please use --header/--header-only options.
#
# Overhead\tShared Object\tSymbol
#
    40.00%\tpenstock-69c3b9f6f8d0d215f2d7bd51.so\t[.] PanelRows<bfloat16, bfloat16, bfloat16, 4>::run<6>
    20.00%\tpenstock-69c3b9f6f8d0d215f2d7bd51.so\t[.] VectorAttention<bfloat16>::run<3>
     4.00%\tpenstock-69c3b9f6f8d0d215f2d7bd51.so\t[.] softmax_weights<bfloat16>
     3.00%\tpenstock-69c3b9f6f8d0d215f2d7bd51.so\t[.] rotate_parts<8, true>
     2.00%\tpenstock-69c3b9f6f8d0d215f2d7bd51.so\t[.] rotate_row<bfloat16, float>
     1.50%\tpenstock-69c3b9f6f8d0d215f2d7bd51.so\t[.] gate_row<Silu, bfloat16>
     5.50%\tpenstock-69c3b9f6f8d0d215f2d7bd51.so\t[.] (anonymous namespace)::Pool::start
     9.00%\tpython3.11\t[.] _PyEval_EvalFrameDefault
     5.00%\tlibtorch_cpu.so\t[.] at::native::add
     6.00%\t[kernel.kallsyms]\t[k] finish_task_switch.isra.0
     4.00%\tlibc.so.6\t[.] malloc
"""


def test_samples_are_counted_by_the_parts_of_a_step() -> None:
    shares = shares_of(REPORT.splitlines())
    assert shares == pytest.approx(
        {
            "products": 0.4,
            "attention": 0.24,
            "rotating, quantising": 0.03,
            "norms, rotary, rest": 0.02,
            "SwiGLU": 0.015,
            "waiting": 0.055,
            "Python": 0.09,
            "torch": 0.05,
            "system": 0.06,
            "sampling": 0.0,
            "other": 0.04,
        }
    )


def column_of(symbol: str) -> str:
    shares = shares_of([f"100.00%\tpenstock-1.so\t[.] {symbol}"])
    return max(shares, key=lambda column: shares[column])


@pytest.mark.parametrize("source", [*PRODUCTS, *ATTENTION])
def test_names_of_kernels_for_every_processor_are_known(source: str) -> None:
    """So a processor whose kernels this machine cannot run has its column, too."""
    (path,) = Path(native.__file__).parent.rglob(source)
    text = path.read_text()
    spaces = re.findall(r"^namespace (\w+) \{", text, re.MULTILINE)
    # Functions that are always inlined have no samples of their own.
    names = re.findall(r"^(?:class|struct|(?:__attribute__\S* )?void|float) (\w+)(?:[ ;(]|$)", text, re.MULTILINE)
    assert spaces or names
    columns = {name: column_of("::".join([*spaces, name]) + "<bfloat16>") for name in names or spaces}
    assert columns == dict.fromkeys(columns, "products" if source in PRODUCTS else "attention")


@pytest.mark.parametrize(
    ("symbol", "column"),
    [
        ("wide::sum_block<bfloat16, 6, 1, 1>", "products"),
        ("_ZZ8for_eachIZN4wide8multiplyI8bfloat16S1_S1_EEvPKT_lRK6LinearENUlPKvlE_4_FUNESE_l", "products"),
        ("TilePiece<bfloat16, bfloat16, float>::run", "products"),
        ("TileAttention::run", "attention"),
        ("_ZZ8for_eachIZNK10LayerHeadsI8bfloat16E6attendEPS1_EUllE_EvlRKT_bENUlPKvlE_4_FUNES8_l", "attention"),
        ("quantize_in_blocks<float>", "rotating, quantising"),
        ("unpack_block_row<float>", "norms, rotary, rest"),
    ],
)
def test_a_sample_is_counted_by_its_name(symbol: str, column: str) -> None:
    assert column_of(symbol) == column
