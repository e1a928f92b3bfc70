"""The place of each layer of a model in the pages of the KV cache, as ``pages.py`` chooses it. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PageLayout:
    """Which layer is where.

    Args:
        windows: of each group; None sees all. Groups of such layers come first.
        num_places: of a page.
        groups, places: of each attention of the model, in its order.
    """

    windows: tuple[int | None, ...]
    num_places: int
    groups: tuple[int, ...]
    places: tuple[int, ...]

    def page_bytes(self, bytes_per_token: int, block_size: int) -> int:
        """Of a page, where a token takes ``bytes_per_token`` in all layers together, and in each as much.

        Layers that read what another stores are where that is, and take nothing.
        """
        num_storing = len(set(zip(self.groups, self.places, strict=True)))
        return bytes_per_token // num_storing * self.num_places * block_size
