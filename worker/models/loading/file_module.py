"""Modules of a model that are created from its files, without transformers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....shared.errors import ModelLoadError
from ..formats.tensors import Readable, Unpacked
from ..placing.file_numbers import empty_weight, has_matrices
from ..plan import DecoderPlan


class MissingTensorError(ModelLoadError, AttributeError):
    """The files of a model lack a tensor of that name."""


class _Part(nn.Module):
    """A part of the model that is neither a linear layer nor an embedding."""

    def __init__(self, name: str, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self._name = name
        # The code of layers asks for the bias of modules that may have none.
        for leaf, tensor in ({"bias": None} | tensors).items():
            if tensor is not None and not isinstance(tensor, nn.Parameter):
                self.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
            else:
                # It may know its sources in the file.
                self.register_parameter(leaf, tensor)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise MissingTensorError(f"its files lack {self._name}.{name}") from error


class FileModule(nn.Module):
    """Stands for transformers' module of a model, for ``LeanDecoder``. It reads a part of the model when it is asked
    for, and does not keep it.

    Args:
        tensors: of the files, by the names of the module's tensors.
        dtype: of all tensors.
        angles: the modules that compute angles, by their names.
        takes_file_numbers: linear layers and experts whose numbers in the file our kernels can use get weights without
            content.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        tensors: Readable,
        plan: DecoderPlan,
        dtype: torch.dtype,
        angles: dict[str, nn.Module],
        *,
        takes_file_numbers: bool = False,
    ) -> None:
        super().__init__()
        self._takes_file_numbers = takes_file_numbers
        self.dtype = dtype
        self._tensors = tensors
        self._plan = plan
        self._angles = angles
        self._leaves: dict[str, list[str]] = {}
        for name in tensors:
            holder, _, leaf = name.rpartition(".")
            self._leaves.setdefault(holder, []).append(leaf)
        self._embedding: nn.Module | None = None

    def get_submodule(self, target: str) -> nn.Module:
        """Return a new module with the tensors directly below that name."""
        if target in self._angles:
            return self._angles[target]
        if target == self._plan.embedding:
            return self._embedding_module()
        if target not in self._leaves:
            if target == self._plan.head:
                weight = self._empty_weight(self._plan.embedding)
                return _linear_layer(self._embedding_module().weight if weight is None else weight, None)
            # A part without tensors of its own, such as a whole feed-forward part.
            return _Part(target, {})
        of_layers = self._plan.layer_embeddings
        if of_layers is not None and target == of_layers.embedding:
            return ScaledEmbedding(self._read_tensor(f"{target}.weight"), of_layers.embedding_scale)
        empty = self._empty_weight(target)
        parts = {} if empty is None else {"weight": empty}
        parts |= {leaf: self._read_part(f"{target}.{leaf}") for leaf in self._leaves[target] if leaf not in parts}
        weight = parts.get("weight")
        if weight is not None and weight.ndim == 2 and parts.keys() <= {"weight", "bias"}:
            return _linear_layer(weight, parts.get("bias"))
        return _Part(target, parts)

    def get_parameter(self, target: str) -> nn.Parameter:
        return nn.Parameter(self._read_tensor(target), requires_grad=False)

    def _embedding_module(self) -> Any:
        if self._embedding is None:
            weight = self._read_tensor(f"{self._plan.embedding}.weight")
            self._embedding = ScaledEmbedding(weight, self._plan.embedding_scale)
        return self._embedding

    def _empty_weight(self, layer: str) -> nn.Parameter | None:
        """Return a weight that knows its source, for a linear layer whose numbers in the file can be used."""
        source = self._tensors.get(f"{layer}.weight")
        is_linear = set(self._leaves.get(layer, ())) <= {"weight", "bias"}
        if not self._takes_file_numbers or not is_linear or not isinstance(source, Unpacked) or source.blocks is None:
            return None
        return empty_weight(source)

    def _read_part(self, name: str) -> Tensor:
        """Read a tensor, unless it is a stack of matrices whose numbers in the file can be used."""
        source = self._tensors.get(name)
        return empty_weight(source) if self._takes_file_numbers and has_matrices(source) else self._read_tensor(name)

    def _read_tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise MissingTensorError(f"its files lack {name}")
        tensor = self._tensors[name][...]
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


class ScaledEmbedding(nn.Module):
    """An embedding whose rows are multiplied by a factor."""

    def __init__(self, weight: Tensor, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._scale = scale

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = F.embedding(token_ids, self.weight)
        return rows if self._scale == 1.0 else rows * self._scale


def _linear_layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


class AnglesKind(msgspec.Struct, frozen=True):
    """Cosines and sines that a module computes, as products of positions and frequencies.

    Args:
        arguments, options: those of ``AnglesPlan`` for which the module computes them.
        frequencies: ``[R / 2]``.
        factor: of cosines and sines.
        is_rounded: they are rounded to the dtype of the hidden states; else they are in float32.
        columns: "halves" for two equal halves, "pairs" for two equal columns per frequency, "single" for one column.
    """

    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    frequencies: list[float]
    factor: float
    columns: Literal["halves", "pairs", "single"]
    is_rounded: bool


class Angles(nn.Module):
    """Computes cosines and sines as the module of transformers does whose place it takes."""

    def __init__(self, kinds: Iterable[AnglesKind]) -> None:
        super().__init__()
        self._kinds = {(kind.arguments, kind.options): (kind, torch.tensor(kind.frequencies)) for kind in kinds}

    def forward(self, hidden: Tensor, positions: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Return cosines and sines ``[1, T, C]`` of ``positions [1, T]``."""
        kind, frequencies = self._kinds[arguments, tuple(options.items())]
        angles = positions[..., None].float() * frequencies
        if kind.columns == "halves":
            angles = torch.cat((angles, angles), -1)
        elif kind.columns == "pairs":
            angles = angles.repeat_interleave(2, -1)
        cos, sin = angles.cos() * kind.factor, angles.sin() * kind.factor
        return (cos.to(hidden.dtype), sin.to(hidden.dtype)) if kind.is_rounded else (cos, sin)
