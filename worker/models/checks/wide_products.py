"""Products of bfloat16 in float32, for the checks at load on processors without instructions for bfloat16.

With AVX2 alone torch multiplies bfloat16 at a quarter of the speed of float32. Sums are in float32 in both, so the
results are the same but for the order of the sums. Models are not served like this: the compiled kernels compute them.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_PRODUCTS: frozenset[Callable[..., Tensor]] = frozenset(
    (
        F.linear,
        F.scaled_dot_product_attention,
        torch.matmul,
        torch.bmm,
        torch.addmm,
        torch.baddbmm,
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.bmm,
    )
)
_MACHINES = ("x86_64", "AMD64")
_WITHOUT_BFLOAT16 = ("AVX2", "DEFAULT")


def wide_products() -> AbstractContextManager[object]:
    """Return a context in which torch multiplies bfloat16 in float32 on the CPU, if that is faster here."""
    capability = torch.backends.cpu.get_cpu_capability()
    is_slow = platform.machine() in _MACHINES and capability in _WITHOUT_BFLOAT16
    return _InFloat32() if is_slow else nullcontext()


class _InFloat32(TorchFunctionMode):
    """Widens the arguments of products, and rounds their results."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func not in _PRODUCTS or not any(map(_is_narrow, args)):
            return func(*args, **options)
        wide_args = [each.float() if _is_narrow(each) else each for each in args]
        wide_options = {name: each.float() if _is_narrow(each) else each for name, each in options.items()}
        return func(*wide_args, **wide_options).bfloat16()


def _is_narrow(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bfloat16 and value.device.type == "cpu"
