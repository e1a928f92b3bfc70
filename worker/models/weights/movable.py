"""The weights of a loaded model, which can leave the device, leave memory, come back, or be replaced.

Replaced weights stay in memory until they are no longer needed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ....shared.errors import ModelLoadError
from ..placing.device import return_free_memory
from ..placing.moving import move_module
from ..placing.packed_linear import PackedLinear


class ModelWeights:
    """An ``engine.sleep.Sleepable``. The modules stay, so references to them remain valid; their tensors are released.

    Buffers are not included: they are small, and some are in no file.

    Args:
        module: on its device, with linear layers packed if they should be.
        load: creates the same module again from its files, equally packed.
    """

    def __init__(self, module: nn.Module, load: Callable[[], nn.Module]) -> None:
        self._module = module
        self._load = load
        self._device = next(module.parameters()).device
        self._is_discarded = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, wherever they are; shared ones are counted once."""
        sizes = {id(tensor): _local(tensor).numel() * tensor.itemsize for _, _, tensor in _weights(self._module)}
        return sum(sizes.values())

    def release(self, level: int) -> None:
        if level == 1 and not self._is_discarded:
            # On the CPU nothing moves.
            nn.Module.to(self._module, "cpu")
        else:
            for holder, name, tensor in _weights(self._module):
                holder[name] = _without_content(tensor)
            self._is_discarded = True
            # The network that ``restore`` loaded shares these tensors, and is part of reference cycles.
            gc.collect()
        return_free_memory()

    def restore(self) -> None:
        """Move the weights back or load them. Raises ``ModelLoadError`` if the files are missing, or have other shapes
        by now.
        """
        if not self._is_discarded:
            move_module(self._module, self._device)
            return
        fresh = self._load()
        self.replace(fresh)
        self._is_discarded = False

    def replace(self, fresh: nn.Module) -> list[Tensor]:
        """Replace the tensors by those of ``fresh``, a result of ``load``; return the former ones.

        Raises:
            ModelLoadError: they have other names, shapes or types; nothing was changed.
        """
        _check_alike(fresh, self._module)
        return self.put([tensor for _, _, tensor in _weights(fresh)])

    def put(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Set ``tensors``, a result of ``replace``; return the former ones."""
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
    """Yield every weight of ``model`` with the dictionary and the name that hold it, in the order of its modules."""
    for module in model.modules():
        # oneDNN's packed tensors are no parameters to torch; other plain tensors are caches of the modules.
        holders = [module._parameters, vars(module)] if isinstance(module, PackedLinear) else [module._parameters]
        for holder in holders:
            for name, value in list(holder.items()):
                if isinstance(value, Tensor):
                    yield holder, name, value


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that transformers has shared: a DTensor, whose import would take time."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _without_content(tensor: Tensor) -> Tensor:
    """Return a tensor of that shape and type that takes no memory."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def _shapes(model: nn.Module) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, tensor.shape, tensor.dtype) for _, name, tensor in _weights(model)]


class Exchange(Protocol):
    """The weights of an engine, on any number of ranks."""

    def exchange(self, folder: Path) -> None:
        """Compute with the weights of ``folder``, and retain the former ones.

        Raises:
            ModelLoadError: they cannot be loaded, or have other shapes; nothing was changed.
        """
        ...

    def put_back(self) -> None:
        """Compute with the former weights again; do nothing if they are in use."""
        ...

    def keep(self) -> None:
        """Release the former weights."""
        ...


class WeightsExchange:
    """The ``Exchange`` of the weights of this process.

    Args:
        weights: in use.
        load: creates the network from the files of a folder, packed like the one in use.
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
