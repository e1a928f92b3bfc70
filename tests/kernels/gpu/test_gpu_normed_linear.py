"""The Triton kernel of normed products against their reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.dispatch import KernelInputError
from penstock.kernels.normed_linear import MAX_ROWS, gpu, normed_linear, reference

pytestmark = pytest.mark.usefixtures("poisoned_memory")

Compare = Callable[[Tensor, Tensor], None]
EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16]
# Rows, inputs and outputs: of one block and of several, with edges on all sides and without.
SHAPES = [(1, 41, 7), (MAX_ROWS, 256, 16), (5, 600, 35)]
GATES = [None, "silu", "gelu_tanh", "gelu"]


class Inputs:
    """Random arguments of a product."""

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, *, is_gated: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(sum(shape))
        num_rows, size, num_outputs = shape

        def random(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator).to(device, dtype)

        num_outputs *= 2 if is_gated else 1
        self.hidden, self.residual = random(num_rows, 2 * size)[:, size:], random(num_rows, size) * 3
        self.norm_weight, self.weight = random(size), random(num_outputs, size) * size**-0.5
        self.bias = random(num_outputs)

    def expected(self, activation: str | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the result in float64, of the rounded sum, which is what a model's next layer takes."""
        sums = self.residual + self.hidden
        wide = None if bias is None else bias.double()
        rows, _ = reference.normed_linear(
            torch.zeros_like(sums).double(),
            sums.double(),
            self.norm_weight.double(),
            EPS,
            self.weight.double(),
            wide,
            activation,
        )
        return rows, sums


@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products(
    shape: tuple[int, int, int], dtype: torch.dtype, activation: str | None, device: torch.device, assert_close: Compare
) -> None:
    inputs = Inputs(shape, dtype, device, is_gated=activation is not None)
    for bias, norm_weight in ((None, inputs.norm_weight), (inputs.bias, inputs.norm_weight.float())):
        hidden, residual = inputs.hidden.clone(), inputs.residual.clone()
        rows, sums = gpu.normed_linear(hidden, residual, norm_weight, EPS, inputs.weight, bias, activation)
        expected, expected_sums = inputs.expected(activation, bias)
        assert torch.equal(sums, expected_sums)
        assert_close(rows, expected)
        # Other programs may still read them.
        assert torch.equal(hidden, inputs.hidden)
        assert torch.equal(residual, inputs.residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, device: torch.device) -> None:
    inputs = Inputs((MAX_ROWS, 600, 35), dtype, device, is_gated=True)

    def run(rows: slice) -> tuple[Tensor, Tensor]:
        arguments = inputs.norm_weight, EPS, inputs.weight, None, "silu"
        return gpu.normed_linear(inputs.hidden[rows], inputs.residual[rows].clone(), *arguments)

    whole = run(slice(None))
    # The interpreter multiplies by numpy, for which a row's place counts.
    others = (slice(7, 8), slice(3, 12)) if device.type == "cuda" else ()
    for rows in (slice(0, 1), slice(0, 12), *others):
        assert all(torch.equal(part, all_rows[rows]) for part, all_rows in zip(run(rows), whole, strict=True))


def test_no_rows_and_too_many(device: torch.device, assert_close: Compare) -> None:
    for num_rows in (0, MAX_ROWS + 1):
        inputs = Inputs((num_rows, 41, 7), torch.float32, device)
        rows, sums = gpu.normed_linear(
            inputs.hidden, inputs.residual.clone(), inputs.norm_weight, EPS, inputs.weight, None, None
        )
        expected, expected_sums = inputs.expected(None, None)
        assert torch.equal(sums, expected_sums)
        assert_close(rows, expected)


def test_not_a_number_stays_in_its_row(device: torch.device) -> None:
    inputs = Inputs((3, 41, 7), torch.float32, device)
    inputs.residual[1, 5] = float("nan")
    rows, _ = gpu.normed_linear(
        inputs.hidden, inputs.residual, inputs.norm_weight, EPS, inputs.weight, inputs.bias, None
    )
    assert rows.isnan().all(dim=1).tolist() == [False, True, False]
    assert not rows[::2].isnan().any()


def test_the_wrapper_selects_the_kernel_and_names_wrong_inputs(device: torch.device, assert_close: Compare) -> None:
    inputs = Inputs((2, 41, 8), torch.float32, device, is_gated=True)
    rows = {"hidden": inputs.hidden, "residual": inputs.residual.clone(), "norm_weight": inputs.norm_weight}
    plain: dict[str, Any] = {**rows, "eps": EPS, "weight": inputs.weight}
    assert_close(normed_linear(**plain, activation="silu", backend="triton")[0], inputs.expected("silu", None)[0])
    for changes, message in (
        ({"residual": inputs.residual[:1]}, "hidden and residual must"),
        ({"norm_weight": inputs.norm_weight[1:]}, "norm_weight must"),
        ({"activation": "relu2"}, "activation must"),
        ({"weight": inputs.weight[1:], "activation": "silu"}, "weight must"),
        ({"weight": torch.cat([inputs.weight, inputs.weight], 1)[:, :41]}, "weight must be contiguous"),
        ({"bias": inputs.bias[1:]}, "bias must"),
    ):
        changed: dict[str, Any] = {**plain, **changes}
        with pytest.raises(KernelInputError, match=message):
            normed_linear(**changed)
