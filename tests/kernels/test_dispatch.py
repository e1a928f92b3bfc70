"""Choice of a kernel's implementation."""

from __future__ import annotations

import logging

import pytest
import torch

from penstock.kernels.dispatch import REFERENCE, OnGpu, select

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def reference() -> None:
    """Runs everywhere."""


def test_a_device_without_a_kernel_uses_the_reference() -> None:
    assert select({REFERENCE: reference}, GPU, torch.float32) is reference
    assert select({REFERENCE: reference, "cpu": min}, CPU, torch.float32) is min


def test_a_gpu_uses_the_kernels_of_its_module() -> None:
    assert select({REFERENCE: reference, "cuda": OnGpu("math", "gcd")}, GPU, torch.bfloat16).__name__ == "gcd"


@pytest.mark.parametrize(
    ("implementation", "why"),
    [
        (OnGpu("math", "gcd", dtypes=(torch.float16,)), "math.gcd does not support torch.bfloat16"),
        (OnGpu("math.nowhere", "gcd"), "math.nowhere cannot be imported"),
    ],
)
def test_where_a_kernel_cannot_run_the_reference_does_and_warns_once(
    implementation: OnGpu, why: str, log_records: list[logging.LogRecord]
) -> None:
    for _ in range(2):
        assert select({REFERENCE: reference, "cuda": implementation}, GPU, torch.bfloat16) is reference
    assert [record.__dict__["reason"].startswith(why) for record in log_records] == [True]


def test_a_backend_by_name_has_its_own_whatever_the_device() -> None:
    implementations = {REFERENCE: reference, "cpu": min, "cuda": OnGpu("math", "gcd")}
    assert select(implementations, GPU, torch.float32, "reference") is reference
    assert select(implementations, CPU, torch.float32, "reference") is reference
    assert select(implementations, CPU, torch.float32, "triton").__name__ == "gcd"
    assert select(implementations, CPU, torch.float32, "auto") is min
    assert select({REFERENCE: reference}, CPU, torch.float32, "native") is reference
