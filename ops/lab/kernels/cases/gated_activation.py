"""Feed-forward layers of 0.6B and 8B models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from .....kernels.gated_activation import gelu_and_mul, reference, silu_and_mul
from . import Case, Setting

_FORMS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "silu": (silu_and_mul, reference.silu_and_mul),
    "gelu tanh": (partial(gelu_and_mul, approximate="tanh"), partial(reference.gelu_and_mul, approximate="tanh")),
    "gelu": (gelu_and_mul, partial(reference.gelu_and_mul, approximate="none")),
}


def cases(setting: Setting) -> Iterator[Case]:
    """Yield cases from one request's decode to a prefill."""
    sizes_on_gpu = [(1, 12288), (64, 12288), (8192, 3072), (8192, 12288)]
    for num_tokens, size in setting.choose(on_gpu=sizes_on_gpu, on_cpu=[(64, 1024)]):
        gate_up = setting.random(num_tokens, 2 * size)
        for name, (run, truth) in _FORMS.items():
            yield Case(
                shape=f"{name} T={num_tokens} I={size}",
                dtype=gate_up.dtype,
                inputs=(gate_up,),
                run=run,
                truth=truth,
                rivals={"torch": truth, **setting.compiled(truth)},
                num_bytes=gate_up.nbytes * 3 // 2,
            )
