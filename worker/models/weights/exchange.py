"""Weights in the place of others, which stay in memory until it is known that they are not wanted any more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from .movable import ModelWeights


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
