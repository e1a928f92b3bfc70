"""GPTQ and AWQ: integers of a few bits in words of 32, along the columns of the transposed weight.

Sources: GPTQModel's ``convert_gptq_v1_to_v2_format_module`` and its layer in torch; AutoAWQ's ``WQLinear_GEMM``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ....shared.errors import ModelLoadError
from .declared import Quantization
from .tensors import Grid, Readable, StoredTensors, Unpacked, unpack_words, unpacked_integers

_WORD = 32
# Name of the dtype in safetensors.
_WORDS = "I32"
_WEIGHT = ".qweight"
# The first format stores zero points minus one. The 1 was subtracted from whole words, so it is added to whole words: a
# borrow from the neighbour of a zero point of 0 is then undone.
_ONES = {bits: sum(1 << shift for shift in range(0, _WORD, bits)) for bits in (2, 4, 8)}
# The column of each four bits of AWQ's words, the lowest first, inverted.
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
_AWQ_BITS = 4

_OfLayer = Callable[[str, torch.dtype], Unpacked]


def read_gptq(stored: StoredTensors, quantization: Quantization, dtype: torch.dtype) -> Readable:
    """Read ``X.qweight`` [I * bits / 32, O], ``X.qzeros`` [G, O * bits / 32], ``X.scales`` [G, O], ``X.g_idx`` [I].

    The number of bits follows from the shapes, because layers may differ from the configuration.
    """
    settings = quantization.settings
    is_second = str(settings.get("checkpoint_format", "gptq")).lower() == "gptq_v2"
    return _read_all(stored, dtype, partial(_gptq, stored, is_second, bool(settings.get("desc_act"))))


def read_awq(stored: StoredTensors, _quantization: Quantization, dtype: torch.dtype) -> Readable:
    """Read ``X.qweight`` [I, O / 8], ``X.qzeros`` [G, O / 8], ``X.scales`` [G, O]."""
    return _read_all(stored, dtype, partial(_awq, stored))


def _read_all(stored: StoredTensors, dtype: torch.dtype, of_layer: _OfLayer) -> Readable:
    tensors: Readable = {}
    for layer in (name.removesuffix(_WEIGHT) for name in stored if name.endswith(_WEIGHT)):
        lacking = [name for name in (f"{layer}.qzeros", f"{layer}.scales") if name not in stored]
        if lacking:
            raise ModelLoadError(f"{layer}{_WEIGHT} needs {lacking[0]}, which is in no file; fetch the model again")
        if stored.dtype(layer + _WEIGHT) != _WORDS:
            raise ModelLoadError(
                f"{layer}{_WEIGHT} is of {stored.dtype(layer + _WEIGHT)}, and words of {_WORDS} are wanted there; "
                "fetch the model again"
            )
        tensors[f"{layer}.weight"] = of_layer(layer, dtype)
    return tensors


def _gptq(stored: StoredTensors, is_second: bool, is_ordered: bool, layer: str, dtype: torch.dtype) -> Unpacked:
    num_words, num_outputs = stored.shape(layer + _WEIGHT)
    num_groups = stored.shape(f"{layer}.scales")[0]
    bits = stored.shape(f"{layer}.qzeros")[1] * _WORD / num_outputs
    if bits not in _ONES:
        raise _unfit(stored, layer)
    bits = int(bits)
    num_inputs = num_words * _WORD // bits
    zeros = stored.read(f"{layer}.qzeros")
    zeros = unpack_words(zeros if is_second else zeros + _signed(_ONES[bits]), bits)
    order = f"{layer}.g_idx"
    if is_ordered and num_groups > 1 and order not in stored:
        raise ModelLoadError(
            f"{layer}{_WEIGHT} was quantised in an order of its own (desc_act), and {order}, which says it, is in no "
            "file; fetch the model again"
        )
    columns = stored.read(order).long() if order in stored else _groups(num_inputs, num_groups)
    if len(columns) != num_inputs or int(columns.max()) >= num_groups:
        raise _unfit(stored, layer)
    grid = _grid(stored, layer, zeros, columns)

    def read() -> Callable[[slice], Tensor]:
        words = stored.read(layer + _WEIGHT).T.contiguous()
        return lambda rows: unpack_words(words[rows], bits)

    return unpacked_integers((num_outputs, num_inputs), dtype, read, grid, bits)


def _awq(stored: StoredTensors, layer: str, dtype: torch.dtype) -> Unpacked:
    num_inputs, num_words = stored.shape(layer + _WEIGHT)
    num_groups, num_outputs = stored.shape(f"{layer}.scales")
    num_per_word = len(_AWQ_ORDER)
    fits = num_outputs == num_words * num_per_word and num_inputs % num_groups == 0
    if not fits or stored.shape(f"{layer}.qzeros") != (num_groups, num_words):
        raise _unfit(stored, layer)
    zeros = _in_order(stored.read(f"{layer}.qzeros"))
    grid = _grid(stored, layer, zeros, _groups(num_inputs, num_groups))

    def read() -> Callable[[slice], Tensor]:
        words = stored.read(layer + _WEIGHT)
        return lambda rows: _in_order(words[:, rows.start // num_per_word : -(-rows.stop // num_per_word)]).T

    return unpacked_integers((num_outputs, num_inputs), dtype, read, grid, _AWQ_BITS)


def _in_order(words: Tensor) -> Tensor:
    return unpack_words(words, _AWQ_BITS).unflatten(-1, (-1, len(_AWQ_ORDER)))[..., _AWQ_ORDER].flatten(-2)


def _grid(stored: StoredTensors, layer: str, zeros: Tensor, columns: Tensor) -> Grid:
    """Return the grid of scales and zero points [G, O] for the weight [O, I]."""
    scales = stored.read(f"{layer}.scales")
    if scales.shape != zeros.shape:
        raise _unfit(stored, layer)
    return Grid(scales.T.float(), zeros.T.float(), torch.arange(scales.shape[1]), columns)


def _groups(num_inputs: int, num_groups: int) -> Tensor:
    return torch.arange(num_inputs) // -(-num_inputs // num_groups)


def _signed(word: int) -> int:
    return word - (1 << _WORD) if word >= 1 << (_WORD - 1) else word


def _unfit(stored: StoredTensors, layer: str) -> ModelLoadError:
    names = [f"{layer}{end}" for end in (_WEIGHT, ".qzeros", ".scales", ".g_idx") if f"{layer}{end}" in stored]
    shapes = ", ".join(f"{name} {list(stored.shape(name))}" for name in names)
    return ModelLoadError(f"these do not fit each other: {shapes}; fetch the model again")
