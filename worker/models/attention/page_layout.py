"""The place of each layer of a model in the pages of the KV cache, as ``pages.py`` chooses it. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PageLayout:
    """The group and place of each layer.

    Args:
        windows: of each group; None for layers that attend to all tokens. Their groups come first.
        num_places: of a page.
        groups, places: of each attention call of the model, in its order.
    """

    windows: tuple[int | None, ...]
    num_places: int
    groups: tuple[int, ...]
    places: tuple[int, ...]

    def page_bytes(self, bytes_per_token: int, block_size: int) -> int:
        """Return the bytes of a page, if a token takes ``bytes_per_token`` over all layers, and the same in each.

        Layers that read from another layer's cache take no memory.
        """
        num_storing = len(set(zip(self.groups, self.places, strict=True)))
        return bytes_per_token // num_storing * self.num_places * block_size
