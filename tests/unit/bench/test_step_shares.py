"""Samples of ``perf`` by the parts of a step."""

from __future__ import annotations

import pytest

from penstock.ops.lab.bench.step_shares import shares_of

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
