"""Pages of the KV cache: which layers share a block when some layers attend within a window.

The reasons are in ops/decisions/kv_blocks.md.

A page has a number of *places*. Each place holds the keys and values of ``block_size`` tokens of one layer. A page is
assigned to a *group*: as many layers of one kind (layers that attend to everything, or layers of one window) as a page
has places. So a page serves any group, and a page that one group returns can be used by another. The caches of a place
are one tensor, which one layer of each group uses: every layer finds its own tokens in it by the block table of its
group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch

from .call import AttentionCall
from .page_layout import PageLayout

# More groups need more block tables per request. So the widest page is chosen whose requests take little more memory
# than with the best width. Requests are compared at this multiple of the largest window, or at the longest possible
# length.
_MOST_GROUPS = 32
_TOLERATED_PADDING = 1.05
_NUM_WINDOWS = 8
# Share of the memory of a request with one table. If groups save less than the rest, they are not worth their tables.
_WORTH_WHILE = 0.9


@runtime_checkable
class PagedByGroups(Protocol):
    """A ``Forward`` that supports caches in pages."""

    @property
    def attention_calls(self) -> list[AttentionCall]: ...

    def allocate_pages(
        self, layout: PageLayout, num_pages: int, block_size: int, num_slots: int, device: torch.device
    ) -> None:
        """Allocate as ``Forward.allocate`` does, for steps whose batch has one block table per group."""
        ...


def plan_pages(calls: Sequence[AttentionCall], max_model_len: int, block_size: int) -> PageLayout | None:
    """Return the page layout for the layers of ``calls``; None if one block table for all layers is as good."""
    storing = [call for call in calls if call.source is None]
    kinds = Counter(_window_of(call, max_model_len) for call in storing)
    if set(kinds) == {None}:
        return None

    def tokens_taken(num_places: int, num_tokens: int) -> int:
        """Return the tokens of one layer that a request of ``num_tokens`` takes."""
        return sum(
            -(-count // num_places) * num_places * min(num_tokens, (window or num_tokens) + block_size)
            for window, count in kinds.items()
        )

    def num_groups(num_places: int) -> int:
        return sum(-(-count // num_places) for count in kinds.values())

    sizes = [size for size in range(1, max(kinds.values()) + 1) if num_groups(size) <= _MOST_GROUPS]
    usual = min(max_model_len, _NUM_WINDOWS * max(window or 0 for window in kinds))
    least = min(tokens_taken(size, usual) for size in sizes)
    num_places = max(size for size in sizes if tokens_taken(size, usual) <= _TOLERATED_PADDING * least)
    if tokens_taken(num_places, max_model_len) > _WORTH_WHILE * len(storing) * max_model_len:
        return None
    layout = _lay_out([_window_of(call, max_model_len) for call in storing], num_places)
    # A call that stores nothing has the place of its source.
    index_of = {id(call): index for index, call in enumerate(storing)}
    stored_at = [index_of[id(call.source or call)] for call in calls]
    return replace(
        layout, groups=tuple(layout.groups[i] for i in stored_at), places=tuple(layout.places[i] for i in stored_at)
    )


def shapes_differ(calls: Sequence[AttentionCall]) -> bool:
    """Whether a token takes more memory in some layers than in others, so that they cannot share pages."""
    return len({(call.key_shape, call.value_shape, call.cache_format.dtype) for call in calls}) > 1


def use_pages(calls: Sequence[AttentionCall], layout: PageLayout | None) -> None:
    """Let each call use the block table of its group from now on; None for one table."""
    for index, call in enumerate(calls):
        call.group = 0 if layout is None else layout.groups[index]


def allocate_pages(
    calls: Sequence[AttentionCall], layout: PageLayout, num_pages: int, block_size: int, device: torch.device
) -> None:
    """Allocate one cache per place for all ``calls``; one layer of each group uses it."""
    use_pages(calls, layout)
    for call in calls:
        call.caches = None  # release the earlier ones first
    of_places = [calls[0].new_caches(num_pages, block_size, device) for _ in range(layout.num_places)]
    for call, place in zip(calls, layout.places, strict=True):
        call.caches = of_places[place]


def _window_of(call: AttentionCall, max_model_len: int) -> int | None:
    """Return the window of ``call``; None if it attends to all tokens, or has a rule that may reach any token."""
    is_narrow = call.window is not None and call.window < max_model_len and not call.has_own_rule
    return call.window if is_narrow else None


def _lay_out(windows: Sequence[int | None], num_places: int) -> PageLayout:
    """Fill one group after the other. The last group of each kind may have fewer layers than places."""
    kinds = sorted(set(windows), key=lambda window: (window is not None, window or 0))
    of_groups: list[int | None] = []
    groups, places = [0] * len(windows), [0] * len(windows)
    for kind in kinds:
        layers = [index for index, window in enumerate(windows) if window == kind]
        for number, index in enumerate(layers):
            if number % num_places == 0:
                of_groups.append(kind)
            groups[index], places[index] = len(of_groups) - 1, number % num_places
    return PageLayout(tuple(of_groups), num_places, tuple(groups), tuple(places))
