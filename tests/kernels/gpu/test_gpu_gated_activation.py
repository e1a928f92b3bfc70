"""The Triton kernel of the gated activations against its references in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels.gated_activation import gpu, reference

from .sizes import many

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # The interpreter's numpy warns of divisions by infinity, which the kernel intends for closed gates.
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]

Compare = Callable[[Tensor, Tensor], None]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ODD_SHAPES = [(1, 8), (7, 41), (many(63, 9), 128), (many(3, 2), 2500)]
FORMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (gpu.silu_and_mul, reference.silu_and_mul),
    "gelu": (lambda x: gpu.gelu_and_mul(x, "none"), lambda x: reference.gelu_and_mul(x, "none")),
    "gelu_tanh": (lambda x: gpu.gelu_and_mul(x, "tanh"), lambda x: reference.gelu_and_mul(x, "tanh")),
}


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), ODD_SHAPES)
def test_gates(
    num_tokens: int, size: int, dtype: torch.dtype, form: str, device: torch.device, assert_close: Compare
) -> None:
    run, truth = FORMS[form]
    wide = random(num_tokens, 2 * size + 3, dtype=dtype, device=device) * 3
    for gate_up in (wide[:, 3:], wide[:, 3:].contiguous(), wide[:, 3:].T.contiguous().T):
        assert_close(run(gate_up), truth(gate_up.double()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_gates(form: str, dtype: torch.dtype, device: torch.device, assert_close: Compare) -> None:
    run, truth = FORMS[form]
    gates = [-3e4, -90.0, -20.0, -5.0, -1e-4, 0.0, 1e-4, 5.0, 20.0, 90.0, 3e4]
    gate_up = torch.tensor([gates + [1.0] * len(gates)], dtype=dtype, device=device)
    assert_close(run(gate_up), truth(gate_up.double()))


@pytest.mark.parametrize("form", FORMS)
def test_not_a_number_stays_one_and_touches_no_other(form: str, device: torch.device) -> None:
    gate_up = torch.ones(2, 8, device=device)
    gate_up[0, 1] = gate_up[1, 6] = float("nan")
    expected = torch.zeros(2, 4, dtype=torch.bool, device=device)
    expected[0, 1] = expected[1, 2] = True
    assert torch.equal(FORMS[form][0](gate_up).isnan(), expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_same_bits_in_any_batch(form: str, device: torch.device) -> None:
    run = FORMS[form][0]
    gate_up = random(22, 2 * 100, dtype=torch.float32, device=device)
    gated = run(gate_up)
    for first, last in ((0, 1), (17, 18), (5, 22)):
        assert torch.equal(run(gate_up[first:last]), gated[first:last])


def test_no_rows(device: torch.device) -> None:
    assert gpu.silu_and_mul(torch.empty(0, 8, device=device)).shape == (0, 4)
