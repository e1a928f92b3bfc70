"""Hidden rows of a model, and the heads of Qwen3 with a weight for each head."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from .....kernels.rms_norm import add_rms_norm, reference, rms_norm
from . import Case, Setting

_EPS = 1e-6


def cases(setting: Setting) -> Iterator[Case]:
    """Yield cases of 0.6B and 8B models, from one request's decode to a prefill."""
    for num_tokens, size in setting.choose(
        on_gpu=[(1, 4096), (64, 4096), (8192, 1024), (8192, 4096)], on_cpu=[(64, 1024)]
    ):
        inputs, weight = setting.random(num_tokens, size), setting.random(size)
        yield Case(
            shape=f"T={num_tokens} E={size}",
            dtype=inputs.dtype,
            inputs=(inputs, weight),
            run=_norm,
            truth=_norm_reference,
            rivals={"F.rms_norm": _torch_norm, **setting.compiled(_norm_reference)},
            num_bytes=2 * inputs.nbytes + weight.nbytes,
        )
        yield Case(
            shape=f"add T={num_tokens} E={size}",
            dtype=inputs.dtype,
            inputs=(inputs, setting.random(num_tokens, size), weight),
            run=_add_norm,
            truth=_add_norm_reference,
            rivals=setting.compiled(_add_norm_reference),
            num_bytes=4 * inputs.nbytes + weight.nbytes,
        )
    for num_tokens in setting.choose(on_gpu=[64, 8192], on_cpu=[16]):
        heads, weight = setting.random(num_tokens, 40, 128), setting.random(40, 128)
        yield Case(
            shape=f"heads T={num_tokens} H=40 D=128",
            dtype=heads.dtype,
            inputs=(heads, weight),
            run=_norm,
            truth=_norm_reference,
            rivals=setting.compiled(_norm_reference),
            num_bytes=2 * heads.nbytes + weight.nbytes,
        )


def _norm(inputs: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(inputs, weight, _EPS)


def _norm_reference(inputs: Tensor, weight: Tensor) -> Tensor:
    return reference.rms_norm(inputs, weight, _EPS)


def _torch_norm(inputs: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(inputs, weight.shape, weight, _EPS)


def _add_norm(inputs: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return add_rms_norm(inputs, residual, weight, _EPS)


def _add_norm_reference(inputs: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return reference.add_rms_norm(inputs, residual, weight, _EPS)
