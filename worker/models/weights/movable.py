"""The weights of a loaded model, which can leave the device, leave memory, come back, or be replaced.

Replaced weights stay in memory until they are no longer needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ....shared.errors import ModelLoadError
from ..placing.device import return_free_memory
from ..placing.packed_linear import PackedLinear


class ModelWeights:
    """See ``engine.sleep.Sleepable``. The modules stay, so whatever refers to them goes on to; their tensors go.

    Buffers are no weights: they are small, and some are in no file.

    Args:
        module: on its device, its linear layers packed where they are to be.
        load: makes the same module again from its files, equally packed.
    """

    def __init__(self, module: nn.Module, load: Callable[[], nn.Module]) -> None:
        self._module = module
        self._load = load
        self._device = next(module.parameters()).device
        self._is_discarded = False

    @property
    def num_bytes(self) -> int:
        """What the weights take, on the device or wherever they are; those that are shared count once."""
        sizes = {id(tensor): _local(tensor).numel() * tensor.itemsize for _, _, tensor in _weights(self._module)}
        return sum(sizes.values())

    def release(self, level: int) -> None:
        if level == 1:
            # On the CPU that is where they are, and nothing moves.
            nn.Module.to(self._module, "cpu")
        else:
            for holder, name, tensor in _weights(self._module):
                holder[name] = _without_content(tensor)
            self._is_discarded = True
        return_free_memory()

    def restore(self) -> None:
        """Raises ``ModelLoadError`` if the files are gone, or hold a model of another shape by now."""
        if not self._is_discarded:
            nn.Module.to(self._module, self._device)
            return
        fresh = self._load()
        self.replace(fresh)
        self._is_discarded = False

    def replace(self, fresh: nn.Module) -> list[Tensor]:
        """Put the tensors of ``fresh``, made as ``load`` makes it, in the place of those that are there; return these.

        Raises:
            ModelLoadError: they have other names, shapes or types; nothing was changed.
        """
        _check_alike(fresh, self._module)
        return self.put([tensor for _, _, tensor in _weights(fresh)])

    def put(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Put in place what ``replace`` returned; return what was there."""
        places = list(_weights(self._module))
        for (holder, name, _), tensor in zip(places, tensors, strict=True):
            holder[name] = tensor
        return [tensor for _, _, tensor in places]


def _check_alike(fresh: nn.Module, module: nn.Module) -> None:
    for theirs, ours in zip(_shapes(fresh), _shapes(module), strict=False):
        if theirs != ours:
            there, here = (f"{name} {list(shape)} in {dtype}" for name, shape, dtype in (theirs, ours))
            raise ModelLoadError(
                f"the files hold weights of other names, shapes or types than are loaded: {there}, and {here} here"
            )
    if len(_shapes(fresh)) != len(_shapes(module)):
        raise ModelLoadError("the files hold weights of other names, shapes or types than are loaded: another number")


def _weights(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Every weight of ``model`` with the dictionary and the name that hold it, in the order of its modules."""
    for module in model.modules():
        # What oneDNN has laid out is no parameter to torch; other plain tensors are caches of the modules' own.
        holders = [module._parameters, vars(module)] if isinstance(module, PackedLinear) else [module._parameters]
        for holder in holders:
            for name, value in list(holder.items()):
                if isinstance(value, Tensor):
                    yield holder, name, value


def _local(tensor: Tensor) -> Tensor:
    """What lies here of a tensor that transformers has shared among ranks: a DTensor, whose import takes its time."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _without_content(tensor: Tensor) -> Tensor:
    """A tensor of that shape and type that takes no memory."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def _shapes(model: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, tensor.shape, tensor.dtype) for _, name, tensor in _weights(model)]


class Exchange(Protocol):
    """The weights of an engine, on whatever ranks they are."""

    def exchange(self, folder: Path) -> None:
        """Compute with those of ``folder``, and hold on to the former ones.

        Raises:
            ModelLoadError: they cannot be loaded, or have other shapes; nothing was changed.
        """
        ...

    def put_back(self) -> None:
        """Compute with the former ones again; does nothing where they are in place."""
        ...

    def keep(self) -> None:
        """Let go of the former ones."""
        ...


class WeightsExchange:
    """The ``Exchange`` of what this process holds.

    Args:
        weights: in their place.
        load: makes the network of the files of a folder, packed as the one that computes.
    """

    def __init__(self, weights: ModelWeights, load: Callable[[Path], nn.Module]) -> None:
        self._weights = weights
        self._load = load
        self._former: list[Tensor] | None = None

    def exchange(self, folder: Path) -> None:
        self._former = self._weights.replace(self._load(folder))

    def put_back(self) -> None:
        former, self._former = self._former, None
        if former is not None:
            self._weights.put(former)

    def keep(self) -> None:
        self._former = None
